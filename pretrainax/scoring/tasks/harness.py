"""Evaluates a decoder with the lm-evaluation-harness (extra `eval`), with its tasks, prompts and metrics.

    import lm_eval, pretrainax
    from pretrainax.scoring.tasks.harness import PretrainAX

    model = PretrainAX(pretrainax.load("runs/mine"))
    lm_eval.simple_evaluate(model=model, tasks=["lambada_openai"])

Tokenization is the same as in the harness' own class `hf`, so both classes give the same results for the same weights.
A model that was trained with this project, not imported, reads the same token before a text as in its training.
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
from pretrainax.scoring.likelihood import score_examples
from pretrainax.scoring.scoring_examples import causal_example, context_length, start_token

_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # with the same names in both packages
_MAX_NEW_TOKENS = 256  # the default if a task does not set it, as in `hf`
_ROWS = 16  # prompts per generation batch
_log = logging.getLogger(__name__)

Tokens = list[int]


class PretrainAX(TemplateLM):
    """A decoder as a model of the harness, which computes log-likelihoods in nats and generates text."""

    def __init__(self, loaded: LoadedModel, max_length: Optional[int] = None):
        """Wraps a model that `pretrainax.load` has returned.

        Args:
          max_length: tokens that the model reads at a time; None: the maximum input length, or the sequence length of
            training if the model has no maximum.

        Raises:
          UserError: the model is not a decoder.
        """
        super().__init__()
        model, vocabulary = loaded.experiment.model, loaded.tokenizer.vocabulary
        if model.family != "decoder":
            raise UserError(
                f"{loaded.origin} is of the family {model.family}, but the harness needs a decoder: give a decoder, or "
                "use the tasks of all families with `python -m pretrainax.evaluate --tasks=…`"
            )
        self.loaded = loaded
        self.max_length = max_length or model.position.max_length or context_length(loaded)
        before, start = before_text(loaded.experiment, vocabulary, is_needed=False), start_token(loaded)
        # _begin: tokens that an imported tokenizer adds before a text. _start: the token before a text in our training.
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
        return self._scores([(b if b[:1] == self._start else self._start + b, after) for b, after in pairs])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows = [
            (number, make_disjoint_window(window))
            for number, request in enumerate(requests)
            for window in get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
        ]
        scores, sums = self._scores([window for _, window in windows]), [0.0] * len(requests)
        for (number, _), (log_likelihood, _) in zip(windows, scores, strict=True):
            sums[number] += log_likelihood
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        by_options = collections.defaultdict(list)  # requests with the same options
        for number, request in enumerate(requests):
            by_options[json.dumps(request.args[1], sort_keys=True)].append(number)
        generated = [""] * len(requests)
        for options, numbers in by_options.items():
            sampling = _sampling(json.loads(options))
            for batch in (numbers[i : i + _ROWS] for i in range(0, len(numbers), _ROWS)):
                prompts = [self._fitting(requests[i].args[0], sampling) for i in batch]
                for i, text in zip(batch, generate(self.loaded, prompts, sampling), strict=True):
                    generated[i] = text.text
        return generated

    def _scores(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Returns the scores of continuations, given the tokens before them.

        Args:
          pairs: tokens before the continuation, and tokens of the continuation.

        Returns:
          For each pair, the log-likelihood in nats, and True if greedy decoding gives this continuation.
        """
        examples, cut = [], 0
        for before, after in pairs:
            over = max(len(before) + len(after) - self.max_length - 1, 0)
            cut += over > 0
            examples.append(causal_example(np.array(before[over:], np.int32), np.array(after, np.int32)))
        if cut:
            _log.warning("%d texts were cut from the left to the %d tokens of the model", cut, self.max_length)
        scores = [(0.0, False)] * len(examples)
        for answer in score_examples(self.loaded, enumerate(examples)):
            scores[answer.number] = -answer.nats, answer.best == answer.tokens
        return scores

    def _fitting(self, prompt: str, sampling: Sampling) -> str:
        """Returns the end of a prompt that leaves room for the generated tokens, as in `hf`.

        Prompts that leave enough room are unchanged.
        """
        room = self.max_length - sampling.max_new_tokens - len(self._begin + self._start)
        if room < 1:
            raise UserError(
                f"max_gen_toks is {sampling.max_new_tokens}, but the model reads {self.max_length} tokens: reduce it"
            )
        ids = self.tok_encode(prompt, add_special_tokens=False)
        if len(ids) <= room:
            return prompt
        _log.warning("a prompt of %d tokens was cut from the left to %d", len(ids), room)
        return self.loaded.tokenizer.decode(ids[-room:])


def _sampling(options: dict[str, object]) -> Sampling:
    """Returns the generation options for the harness' `generation_kwargs`; raises UserError for unsupported options."""
    settings: dict[str, object] = dict(normalize_gen_kwargs(options, _MAX_NEW_TOKENS))
    stop, max_new_tokens, draws = (settings.pop(name) for name in ("until", "max_gen_toks", "do_sample"))
    for name in settings.keys() - set(_OPTIONS):
        raise UserError(f"generation_kwargs has {name}={settings[name]!r}, {nearest(name, _OPTIONS)}")
    if not draws:
        settings = {name: value for name, value in settings.items() if name == "repetition_penalty"}
    return Sampling(max_new_tokens=max_new_tokens, stop=tuple(filter(None, stop)), **settings)
