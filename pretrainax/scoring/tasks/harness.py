"""Evaluates a model with the tasks, prompts and metrics of the lm-evaluation-harness (extra `eval`).

    python -m pretrainax.scoring.tasks.harness --model pretrainax --model_args path=DIR --tasks lambada_openai

is the command `lm_eval` with the additional model `pretrainax`. The arguments are path=DIR[,step=…][,max_length=…]
[,dtype=…][,batch_size=…], where DIR and the step are as in `python -m pretrainax.evaluate --from=DIR@step`. In Python:

    import lm_eval, pretrainax
    from pretrainax.scoring.tasks.harness import PretrainAX

    model = PretrainAX(pretrainax.load("runs/mine"))
    lm_eval.simple_evaluate(model=model, tasks=["lambada_openai"])

Tokenization is the same as in the harness's own class `hf`, so both classes give the same results for the same weights.
A model that was trained with PretrainAX, not imported, reads the same start token before a text as in training.
"""

import collections
import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from typing import Optional, Self, Union

import jax
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string

from pretrainax.config import UserError, nearest
from pretrainax.files.json_files import JsonObject
from pretrainax.inference.decoding import generate_examples
from pretrainax.inference.inherited import ends_of_answers, request_of
from pretrainax.inference.load import load
from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.likelihood import score_examples
from pretrainax.scoring.tasks.harness_inputs import HarnessInputs, Tokens
from pretrainax.tokenization.chat import Message

_OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
)  # options with the same names in both packages
_MAX_NEW_TOKENS = 256  # default for tasks that do not set `max_gen_toks`, as in `hf`
_BATCH_SIZE = 16  # prompts per generation batch
_ARGUMENTS = ("path", "step", "max_length", "dtype", "batch_size")  # names of the arguments in --model_args
_log = logging.getLogger(__name__)


class PretrainAX(TemplateLM):
    """An lm-evaluation-harness model that computes log-likelihoods (in nats) and generates text.

    It wraps a decoder or an encoder-decoder.
    """

    def __init__(self, loaded: LoadedModel, max_length: Optional[int] = None, batch_size: int = _BATCH_SIZE):
        """Wraps a model that `pretrainax.load` returned.

        Args:
          max_length: number of tokens that the model reads at a time. The default is its maximum input length, which
            the files of an imported model define as for `hf`, or, without a maximum, the sequence length of training.
          batch_size: number of prompts for which the model generates text at a time. No result depends on it.

        Raises:
          UserError: the model is not a decoder or an encoder-decoder, or an argument is out of range.
        """
        super().__init__()
        if type(batch_size) is not int or batch_size < 1:
            raise UserError(f"batch_size is {batch_size!r}, it must be a whole number from 1")
        self.loaded, self.batch_size, self._inputs = loaded, batch_size, HarnessInputs(loaded, max_length)
        self.max_length = self._inputs.max_length
        self.backend = "seq2seq" if self._inputs.is_encoder_decoder else "causal"

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Optional[JsonObject] = None) -> Self:
        """Loads the model that `--model_args` describes, as in `create_from_arg_obj`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: JsonObject, additional_config: Optional[JsonObject] = None) -> Self:
        """Loads the model that `--model_args` describes.

        Args:
          arg_dict: the arguments that the module docstring lists.
          additional_config: the flags --batch_size, --max_batch_size and --device of the harness. JAX selects the
            device, and a batch size of "auto" or 1, the default of the harness, selects the default.

        Raises:
          UserError: an argument is unknown or invalid, or the model cannot be loaded.
        """
        # --trust_remote_code adds an argument. It concerns the datasets, because models never run code.
        given = {name: value for name, value in arg_dict.items() if name != "trust_remote_code"}
        for name in given.keys() - set(_ARGUMENTS):
            raise UserError(f"--model_args has {name}={given[name]}, {nearest(name, _ARGUMENTS)}")
        if given.get("path") in (None, ""):
            raise UserError("--model_args has no path: set --model_args path=DIR")
        flags = {name: value for name, value in (additional_config or {}).items() if value is not None}
        batch_size = str(flags.get("batch_size", 1))
        if batch_size.isdecimal() and batch_size != "1":
            given.setdefault("batch_size", int(batch_size))
        device = str(flags.get("device") or jax.default_backend()).partition(":")[0]  # "cuda:0"
        if {"cuda": "gpu"}.get(device, device) != jax.default_backend():
            _log.warning("--device=%s has no effect: JAX uses %s, see JAX_PLATFORMS", device, jax.default_backend())
        path, step, dtype = str(given.pop("path")), given.pop("step", None), given.pop("dtype", None)
        return cls(load(path if step is None else f"{path}@{step}", dtype), **given)

    @property
    def eot_token_id(self) -> Optional[int]:
        return self.loaded.tokenizer.vocabulary.separator

    @property
    def prefix_token_id(self) -> int:
        return self._inputs.prefix

    @property
    def tokenizer_name(self) -> str:
        return self._inputs.fingerprint

    def tok_encode(self, string: str, add_special_tokens: Optional[bool] = None, **kwargs: object) -> Tokens:
        return self._inputs.encode(string, add_special_tokens)

    def chat_template(self, chat_template: Union[bool, str] = False) -> Optional[str]:
        """Selects and returns a chat template, by name; returns None for False.

        NOTE: `hf` returns the named template, but renders conversations with the default template.
        """
        return self._inputs.select_template(chat_template) if chat_template else None

    def apply_chat_template(self, chat_history: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Renders a conversation; without the generation prompt, the model continues the final message."""
        return self._inputs.render_chat(chat_history, not add_generation_prompt)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], Tokens, Tokens]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        return self._scores([(context, continuation) for _, context, continuation in requests])

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
            sampling, notes = request_of(self.loaded, _given(json.loads(options), ends_of_answers(self.loaded)))
            for note in notes:
                _log.info("%s", note)
            prompts = [self._inputs.prompt(requests[i].args[0], sampling.max_new_tokens) for i in numbers]
            examples, limits = [example for example, _ in prompts], [limit for _, limit in prompts]
            stop = sampling.stop
            if (
                sampling.num_beams > 1 and self._inputs.is_encoder_decoder
            ):  # in `hf`, stop strings do not end the search either
                sampling = dataclasses.replace(sampling, stop=())
            texts = generate_examples(self.loaded, examples, sampling, batch_size=self.batch_size, limits=limits)
            for i, text in zip(numbers, texts, strict=True):
                generated[i] = self._inputs.decode(text.ids, stop)
        return generated

    def _scores(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Scores continuations, given the tokens before them.

        Args:
          pairs: tokens before the continuation, and tokens of the continuation.

        Returns:
          For each pair, the log-likelihood in nats, and whether greedy decoding generates the continuation.
        """
        examples = [self._inputs.example(*pair) for pair in pairs]
        if num_cut := sum(len(context) > self._inputs.room(continuation) for context, continuation in pairs):
            _log.warning("%d texts were cut from the left to the %d tokens of the model", num_cut, self.max_length)
        scores = [(0.0, False)] * len(examples)
        for example_score in score_examples(self.loaded, enumerate(examples)):
            scores[example_score.number] = -example_score.nats, example_score.best == example_score.tokens
        return scores


register_model("pretrainax")(PretrainAX)  # not a decorator, which would hide the type of the class


def _given(options: dict[str, object], ends: Sequence[str]) -> dict[str, object]:
    """Converts the harness's `generation_kwargs` to fields of `Sampling`; raises UserError for unsupported options.

    The model's generation_config.json sets the other fields, as in `hf`, except sampling if `do_sample` is false. An
    export lists the ends of answers in this file. A run has no such file, so `ends` are its stop strings.
    """
    settings: dict[str, object] = dict(normalize_gen_kwargs(options, _MAX_NEW_TOKENS))
    stop, max_new_tokens, do_sample = (settings.pop(name) for name in ("until", "max_gen_toks", "do_sample"))
    beams = {"num_beams": settings.pop("num_beams")} if settings.get("num_beams") == 1 else {}  # NorEval's tasks set it
    for name in settings.keys() - set(_OPTIONS):
        raise UserError(f"generation_kwargs has {name}={settings[name]!r}, {nearest(name, _OPTIONS)}")
    if not do_sample:
        settings = {name: value for name, value in settings.items() if name == "repetition_penalty"}
        settings["temperature"] = 0.0
    stop = (*filter(None, stop), *ends)
    return {"max_new_tokens": max_new_tokens, "stop": stop, "num_return": 1, **beams, **settings}


def main() -> int:
    """Runs the command `lm_eval` with the model `pretrainax`; returns the exit code."""
    try:
        cli_evaluate()
    except UserError as e:
        print(f"pretrainax: {e}", file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
