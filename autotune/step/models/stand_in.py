"""A tokenizer in the place of the one that a lone configuration lacks, where no rows of the user's are tokenised."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

_UNKNOWN, _END, _PADDING = "<unk>", "<end>", "<pad>"


def stand_in() -> PreTrainedTokenizerFast:
    """Return a tokenizer that knows no word, with the special tokens that trainers need."""
    words = Tokenizer(WordLevel({_UNKNOWN: 0, _END: 1, _PADDING: 2}, unk_token=_UNKNOWN))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token=_UNKNOWN, eos_token=_END, pad_token=_PADDING, bos_token=_END
    )
