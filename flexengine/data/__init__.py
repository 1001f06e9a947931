"""From files of records, or from a seed, to global batches: sources, records, tokenizer, masks, batches, synthetic."""

from flexengine.data.batches import Batch, GlobalBatches, PreparedSequences, prepare_sequences
from flexengine.data.records import IGNORE, Message, Record, TokenizedRecord, parse_record
from flexengine.data.sources import read_json_sft
from flexengine.data.synthetic import SyntheticBatches
from flexengine.data.tokenizer import ChatTokenizer

__all__ = [
    "IGNORE",
    "Batch",
    "ChatTokenizer",
    "GlobalBatches",
    "Message",
    "PreparedSequences",
    "Record",
    "SyntheticBatches",
    "TokenizedRecord",
    "parse_record",
    "prepare_sequences",
    "read_json_sft",
]
