"""Evaluates a decoder with the tasks, prompts and metrics of the lm-evaluation-harness (extra `eval`).

    import lm_eval, pretrainax
    from pretrainax.scoring.tasks.harness import PretrainAX

    model = PretrainAX(pretrainax.load("runs/mine"))
    lm_eval.simple_evaluate(model=model, tasks=["lambada_openai"])

Tokenization is the same as in the harness's own class `hf`, so both classes give the same results for the same weights.
A model that was trained with PretrainAX, not imported, reads the same start token before a text as in training.
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
from pretrainax.inference.decoding import generate
from pretrainax.inference.framing import is_imported, leading_token_ids, trailing_token_ids
from pretrainax.inference.inherited import request_of
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.request import Sampling
from pretrainax.scoring.likelihood import score_examples
from pretrainax.scoring.scoring_examples import causal_example, context_length, start_token

_OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
)  # options with the same names in both packages
_MAX_NEW_TOKENS = 256  # default for tasks that do not set `max_gen_toks`, as in `hf`
_BATCH_SIZE = 16  # prompts per generation batch
_log = logging.getLogger(__name__)

Tokens = list[int]


class PretrainAX(TemplateLM):
    """An lm-evaluation-harness model that wraps a decoder to compute log-likelihoods (in nats) and generate text."""

    def __init__(self, loaded: LoadedModel, max_length: Optional[int] = None):
        """Wraps a model that `pretrainax.load` returned.

        Args:
          max_length: number of tokens that the model reads at a time. The default is its maximum input length or, if
            there is no maximum, the sequence length of training.

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
        before = leading_token_ids(loaded.experiment, vocabulary, is_needed=False)
        # _begin_tokens and _end_tokens: added around a text by an imported model's tokenizer.
        # _start_tokens: as in PretrainAX training.
        imported = is_imported(loaded.experiment)
        self._begin_tokens, self._start_tokens = (before, []) if imported else ([], before)
        self._end_tokens = trailing_token_ids(loaded.experiment, vocabulary)
        start = vocabulary.bos if imported else start_token(loaded)
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
        ids = self.loaded.tokenizer.encode(string).tolist()
        return ids if add_special_tokens is False else [*self._begin_tokens, *ids, *self._end_tokens]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], Tokens, Tokens]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        pairs = [(before, after) for _, before, after in requests]
        return self._scores(
            [(b if b[:1] == self._start_tokens else self._start_tokens + b, after) for b, after in pairs]
        )

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
        by_options = collections.defaultdict(list)  # options as JSON -> indices of requests
        for number, request in enumerate(requests):
            by_options[json.dumps(request.args[1], sort_keys=True)].append(number)
        generated = [""] * len(requests)
        for options, numbers in by_options.items():
            sampling, notes = request_of(self.loaded, _given(json.loads(options)))
            for note in notes:
                _log.info("%s", note)
            for batch in (numbers[i : i + _BATCH_SIZE] for i in range(0, len(numbers), _BATCH_SIZE)):
                prompts = [self._truncate_prompt(requests[i].args[0], sampling) for i in batch]
                for i, text in zip(batch, generate(self.loaded, prompts, sampling), strict=True):
                    generated[i] = text.text
        return generated

    def _scores(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Scores continuations, given the tokens before them.

        Args:
          pairs: tokens before the continuation, and tokens of the continuation.

        Returns:
          For each pair, the log-likelihood in nats, and whether greedy decoding generates the continuation.
        """
        examples, num_truncated = [], 0
        for before, after in pairs:
            excess = max(len(before) + len(after) - self.max_length - 1, 0)
            num_truncated += excess > 0
            examples.append(causal_example(np.array(before[excess:], np.int32), np.array(after, np.int32)))
        if num_truncated:
            _log.warning(
                "%d texts were cut from the left to the %d tokens of the model", num_truncated, self.max_length
            )
        scores = [(0.0, False)] * len(examples)
        for example_score in score_examples(self.loaded, enumerate(examples)):
            scores[example_score.number] = -example_score.nats, example_score.best == example_score.tokens
        return scores

    def _truncate_prompt(self, prompt: str, sampling: Sampling) -> str:
        """Truncates a prompt from the left, if necessary, so that the generated tokens fit into the input, as in `hf`.

        Returns shorter prompts unchanged. Raises UserError if no prompt token would remain.
        """
        special_tokens = self._begin_tokens + self._start_tokens + self._end_tokens
        max_prompt_tokens = self.max_length - sampling.max_new_tokens - len(special_tokens)
        if max_prompt_tokens < 1:
            raise UserError(
                f"max_gen_toks is {sampling.max_new_tokens}, but the model reads {self.max_length} tokens: reduce it"
            )
        ids = self.tok_encode(prompt, add_special_tokens=False)
        if len(ids) <= max_prompt_tokens:
            return prompt
        _log.warning("a prompt of %d tokens was cut from the left to %d", len(ids), max_prompt_tokens)
        return self.loaded.tokenizer.decode(ids[-max_prompt_tokens:])


def _given(options: dict[str, object]) -> dict[str, object]:
    """Converts the harness's `generation_kwargs` to fields of `Sampling`; raises UserError for unsupported options.

    As in `hf`, the model's generation_config.json sets the other fields, except sampling if `do_sample` is false.
    """
    settings: dict[str, object] = dict(normalize_gen_kwargs(options, _MAX_NEW_TOKENS))
    stop, max_new_tokens, do_sample = (settings.pop(name) for name in ("until", "max_gen_toks", "do_sample"))
    for name in settings.keys() - set(_OPTIONS):
        raise UserError(f"generation_kwargs has {name}={settings[name]!r}, {nearest(name, _OPTIONS)}")
    if not do_sample:
        settings = {name: value for name, value in settings.items() if name == "repetition_penalty"}
        settings["temperature"] = 0.0
    return {"max_new_tokens": max_new_tokens, "stop": tuple(filter(None, stop)), **settings}
