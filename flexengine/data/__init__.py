"""From a file of records, or from a seed, to global batches: sources, chat_template, batches, synthetic."""

from flexengine.data.batches import Batch, GlobalBatches, PreparedSequences, prepare_sequences
from flexengine.data.chat_template import ChatTokenizer, TokenizedRecord
from flexengine.data.sources import Message, Record, read_json_sft
from flexengine.data.synthetic import SyntheticBatches

__all__ = [
    "Batch",
    "ChatTokenizer",
    "GlobalBatches",
    "Message",
    "PreparedSequences",
    "Record",
    "SyntheticBatches",
    "TokenizedRecord",
    "prepare_sequences",
    "read_json_sft",
]
