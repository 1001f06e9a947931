"""From data sets, or from a seed, to global batches: sources, records, tokenizer, masks, store, prepare, batches."""

from flexengine.data.batches import Batch, GlobalBatches
from flexengine.data.prepare import Prepared, prepare_sequences, prepare_sources
from flexengine.data.records import IGNORE, Message, Record, TokenizedRecord, parse_record
from flexengine.data.sources import Source, parse_source, read_json_sft, sources_of
from flexengine.data.store import StoredSequences, default_cache
from flexengine.data.synthetic import SyntheticBatches
from flexengine.data.tokenizer import ChatTokenizer
from flexengine.data.tokenizer_process import TokenizerOptions, TokenizerProcess
from flexengine.data.validation import ValidationBatches, hold_out

__all__ = [
    "IGNORE",
    "Batch",
    "ChatTokenizer",
    "GlobalBatches",
    "Message",
    "Prepared",
    "Record",
    "Source",
    "StoredSequences",
    "SyntheticBatches",
    "TokenizedRecord",
    "TokenizerOptions",
    "TokenizerProcess",
    "ValidationBatches",
    "default_cache",
    "hold_out",
    "parse_record",
    "parse_source",
    "prepare_sequences",
    "prepare_sources",
    "read_json_sft",
    "sources_of",
]
