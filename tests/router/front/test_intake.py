"""What no worker may ever be asked."""

from __future__ import annotations

import pytest
from front_fakes import check_grammar

from core.errors import BadRequest
from router.front.intake import Draft, Intake, ServedModel


async def test_a_request_that_bans_every_token_is_refused() -> None:
    """With `min_tokens`, stop ids and EOS cannot be drawn: a worker left without any token ends its process."""
    model = ServedModel("tiny", 0, max_context_tokens=64, vocab_size=10, eos_token_ids=(9,), weights_digest="")
    intake = Intake(tokenizer=None, model=model, check_grammar=check_grammar)  # type: ignore[arg-type]
    draft = Draft(prompt=(1,), model="tiny", request_id="r", min_tokens=1, stop_token_ids=tuple(range(8)))
    assert (await intake.prepare(draft)).stop.stop_token_ids == tuple(range(8))
    with pytest.raises(BadRequest, match="stop_token_ids"):
        await intake.prepare(Draft("x", "tiny", "r", min_tokens=1, stop_token_ids=tuple(range(9))))
