from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringflash.data.tokenizers import ByteTokenizer, check_vocab, make_tokenizer


@given(document=st.binary())
def test_bytes_round_trip(document):
    tokenizer = make_tokenizer("byte")
    ids = tokenizer.encode(document)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(document)
    assert tokenizer.decode(ids) == document


def test_special_tokens_are_apart_from_bytes_and_decode_to_nothing():
    tokenizer = ByteTokenizer()
    assert (tokenizer.bos, tokenizer.eos, tokenizer.vocab_size) == (256, 257, 258)
    assert tokenizer.decode(np.array([256, 65, 66, 257], np.int32)) == b"AB"


def test_unknown_tokenizer_names_the_known():
    with pytest.raises(ValueError, match=r"no tokenizer 'bite'; known: byte"):
        make_tokenizer("bite")


def test_check_vocab_refuses_a_model_with_too_few_rows():
    check_vocab(ByteTokenizer(), 258)
    check_vocab(ByteTokenizer(), 512)
    with pytest.raises(ValueError, match="at least 258; it is 257"):
        check_vocab(ByteTokenizer(), 257)
