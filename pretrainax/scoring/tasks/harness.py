"""Answers the lm-evaluation-harness (extra `eval`) with a decoder of ours: its tasks, its prompts, its arithmetic.

    import lm_eval, pretrainax
    from pretrainax.scoring.tasks.harness import PretrainAX

    model = PretrainAX(pretrainax.load("runs/mine"))
    lm_eval.simple_evaluate(model=model, tasks=["lambada_openai"])

Texts become tokens as in the harness' own class `hf`, so that the same weights get the same figures from both. What
was trained here, and not imported, has the token before its texts that stood there in training.
"""

import collections
import json
import logging
from collections.abc import Sequence
from typing import Optional

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pretrainax.config import UserError, nearest
from pretrainax.data.sources import NoSource
from pretrainax.inference.decoding import generate
from pretrainax.inference.framing import before_text
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.request import Sampling
from pretrainax.scoring.likelihood import answers
from pretrainax.scoring.questions import causal_example, context_of, start_token

_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # that both sides call so
_MOST_NEW = 256  # tokens, where a task does not say: as in `hf`
_ROWS = 16  # prompts that are gone on with at a time
_log = logging.getLogger(__name__)

Tokens = list[int]


class PretrainAX(TemplateLM):
    """A decoder, as the harness asks one: log-likelihoods in nats, and texts that go on."""

    def __init__(self, loaded: LoadedModel, max_length: Optional[int] = None):
        """Makes it of what `pretrainax.load` returns.

        Args:
          max_length: tokens that the model reads at a time; None: as many as it has positions, else as in training.

        Raises:
          UserError: the model is no decoder.
        """
        super().__init__()
        model, vocabulary = loaded.experiment.model, loaded.tokenizer.vocabulary
        if model.family != "decoder":
            raise UserError(
                f"{loaded.origin} is of the family {model.family}, and the harness asks how a text goes on: give a "
                "decoder, or ask tasks of all families by `python -m pretrainax.evaluate --tasks=…`"
            )
        self.loaded = loaded
        self.max_length = max_length or model.position.max_length or context_of(loaded)
        before, start = before_text(loaded.experiment, vocabulary, is_needed=False), start_token(loaded)
        # What the tokenizers of others put before a text, and what of ours stood there.
        is_imported = isinstance(loaded.experiment.data.source, NoSource)
        self._begin, self._start = (before, []) if is_imported else ([], before)
        self._prefix = vocabulary.separator if start is None else start

    @property
    def eot_token_id(self) -> Optional[int]:
        return self.loaded.tokenizer.vocabulary.separator

    @property
    def prefix_token_id(self) -> Optional[int]:
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        return self.loaded.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: Optional[bool] = None, **kwargs: object) -> Tokens:
        begin = [] if add_special_tokens is False else self._begin
        return [*begin, *self.loaded.tokenizer.encode(string).tolist()]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], Tokens, Tokens]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        pairs = [(before, after) for _, before, after in requests]
        return self._asked([(b if b[:1] == self._start else self._start + b, after) for b, after in pairs])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows = [
            (number, make_disjoint_window(window))
            for number, request in enumerate(requests)
            for window in get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
        ]
        said, sums = self._asked([window for _, window in windows]), [0.0] * len(requests)
        for (number, _), (log_likelihood, _) in zip(windows, said, strict=True):
            sums[number] += log_likelihood
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        alike = collections.defaultdict(list)  # requests with the same options
        for number, request in enumerate(requests):
            alike[json.dumps(request.args[1], sort_keys=True)].append(number)
        said = [""] * len(requests)
        for options, numbers in alike.items():
            sampling = _sampling(json.loads(options))
            for some in (numbers[i : i + _ROWS] for i in range(0, len(numbers), _ROWS)):
                prompts = [self._fitting(requests[i].args[0], sampling) for i in some]
                for i, text in zip(some, generate(self.loaded, prompts, sampling), strict=True):
                    said[i] = text.text
        return said

    def _asked(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each second part after the first, and if its tokens are the likeliest."""
        examples, cut = [], 0
        for before, after in pairs:
            over = max(len(before) + len(after) - self.max_length - 1, 0)
            cut += over > 0
            examples.append(causal_example(np.array(before[over:], np.int32), np.array(after, np.int32)))
        if cut:
            _log.warning("%d texts were cut from the left to the %d tokens of the model", cut, self.max_length)
        said = [(0.0, False)] * len(examples)
        for answer in answers(self.loaded, enumerate(examples)):
            said[answer.number] = -answer.nats, answer.best == answer.tokens
        return said

    def _fitting(self, prompt: str, sampling: Sampling) -> str:
        """Returns the end of a prompt that leaves room for what is to be written, as `hf` does."""
        room = self.max_length - sampling.max_new_tokens - len(self._begin + self._start)
        if room < 1:
            raise UserError(
                f"max_gen_toks is {sampling.max_new_tokens}, and the model reads {self.max_length} tokens: set it lower"
            )
        ids = self.tok_encode(prompt, add_special_tokens=False)
        if len(ids) <= room:
            return prompt
        _log.warning("a prompt of %d tokens was cut from the left to %d", len(ids), room)
        return self.loaded.tokenizer.decode(ids[-room:])


def _sampling(options: dict[str, object]) -> Sampling:
    """Returns what the harness calls `generation_kwargs`; UserError for an option that we do not have."""
    given: dict[str, object] = dict(normalize_gen_kwargs(options, _MOST_NEW))
    stop, most, draws = (given.pop(name) for name in ("until", "max_gen_toks", "do_sample"))
    for name in given.keys() - set(_OPTIONS):
        raise UserError(f"generation_kwargs has {name}={given[name]!r}, {nearest(name, _OPTIONS)}")
    if not draws:
        given = {name: value for name, value in given.items() if name == "repetition_penalty"}
    return Sampling(max_new_tokens=most, stop=tuple(filter(None, stop)), **given)
