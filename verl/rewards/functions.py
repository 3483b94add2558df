"""Finding a reward function from its configuration, and the shapes a reward function may have.

Two signatures are understood, plain or `async`:

- upstream's, one sample a call:
  `compute_score(data_source, solution_str, ground_truth, extra_info, **function_kwargs) -> float | dict`
- TRL's, recognised by a parameter `completions`:
  `reward(prompts, completions, **columns) -> list[float]`, every column of the data set by name. It is called
  with lists of one, so that a sample that fails costs only itself.

Either becomes a `RewardFunction`: a callable that takes a `RewardRequest`. This module is imported by the
scoring processes, so it imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from verl.errors import UserError
from verl.rewards import accuracy
from verl.rewards.math_answers import ANSWER_FORMATS

if TYPE_CHECKING:
    from verl.config.schema import RewardConfig

DEFAULT_NAME = "compute_score"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True, kw_only=True)
class RewardRequest:
    """One sample to be scored."""

    data_source: str
    solution_str: str
    """The response as text."""
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """What the row holds besides: `extra_info` of upstream's layout and every further column, by name."""
    prompt: str | Sequence[Mapping[str, Any]] = ""
    """Messages, or text where the row's prompt is text. Only TRL-style functions see it."""


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A user's function behind one calling convention."""

    call: Callable[[RewardRequest], Any]
    style: Literal["upstream", "trl"]
    required_columns: tuple[str, ...] = ()
    """TRL style: columns the function names and gives no default for."""

    def __call__(self, request: RewardRequest) -> Any:
        return self.call(request)


def resolve_reward_function(config: RewardConfig) -> RewardFunction:
    """The reward function a configuration asks for, checked as far as it can be without data.

    Raises:
        UserError: unknown type or answer format, a number out of range, or a function that cannot be imported,
            is not there, is not callable, or does not accept the arguments.
    """
    check_reward_config(config)
    if config.type == "custom":
        return load_reward_function(str(config.function), config.function_kwargs)
    function = partial(accuracy.compute_score, format_score=config.format_score, answer_format=config.answer_format)
    return adapt_reward_function(function, "accuracy", {})


def check_reward_config(config: RewardConfig) -> None:
    """Everything about the section that needs no import of user code."""
    if config.type not in ("accuracy", "custom"):
        raise UserError(f"reward.type is {config.type!r}; use accuracy, or custom with reward.function")
    if config.type == "custom" and not config.function:
        raise UserError("reward.type is custom but reward.function is not set; give path/to/file.py:name or package.module:name")
    if config.type == "accuracy" and config.function:
        raise UserError(f"reward.function is {config.function!r} but reward.type is accuracy; set reward.type=custom to use it")
    if config.type == "accuracy" and config.function_kwargs:
        raise UserError("reward.function_kwargs is set but reward.type is accuracy; set reward.type=custom, or remove it")
    if config.answer_format not in ANSWER_FORMATS:
        raise UserError(f"reward.answer_format is {config.answer_format!r}; use {' or '.join(ANSWER_FORMATS)}")
    for name in ("scale", "format_score", "failure_reward"):
        if not math.isfinite(getattr(config, name)):
            raise UserError(f"reward.{name} is {getattr(config, name)}; it must be a finite number")
    if not config.timeout_s > 0:
        raise UserError(f"reward.timeout_s is {config.timeout_s}; it must be above 0 seconds")
    if config.workers < 0:
        raise UserError(f"reward.workers is {config.workers}; it must be 0 (as many as cores, 4 at most) or more")


def load_reward_function(spec: str, function_kwargs: Mapping[str, Any]) -> RewardFunction:
    """Import `package.module:name` or `path/to/file.py:name` (`name` defaults to compute_score) and adapt it.

    A file's folder and the working directory join `sys.path`, behind what is there.
    """
    target, _, name = spec.partition(":") if not Path(spec).is_file() else (spec, "", "")
    name = name or DEFAULT_NAME
    _add_to_path(Path.cwd())
    try:
        with _importing(spec):
            module = _import_file(Path(target).expanduser()) if target.endswith(".py") else importlib.import_module(target)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"reward.function {spec!r} cannot be imported: {type(error).__name__}: {reason}") from error
    if not hasattr(module, name):
        known = [n for n, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        raise UserError(
            f"reward.function {spec!r}: there is no {name!r} in {target}; it defines {', '.join(known) or 'no function'}"
        )
    function = getattr(module, name)
    if not callable(function):
        raise UserError(f"reward.function {spec!r} is a {type(function).__name__}, not a function; name one that can be called")
    return adapt_reward_function(function, spec, function_kwargs)


_imported_now: str | None = None


@contextmanager
def _importing(spec: str) -> Iterator[None]:
    global _imported_now
    _imported_now = spec
    try:
        yield
    finally:
        _imported_now = None


def refuse_training_while_importing() -> None:
    """Raises UserError when the file of a reward function, being imported to score with it, starts to train itself."""
    if _imported_now is not None:
        raise UserError(
            f"reward.function {_imported_now!r}: scoring processes import that file, and it starts a training when it is "
            "imported; put the training under `if __name__ == '__main__':`, or the function in a file of its own"
        )


def adapt_reward_function(function: Callable[..., Any], spec: str, function_kwargs: Mapping[str, Any]) -> RewardFunction:
    """Wrap a function of either style; `spec` is its name in messages.

    Raises:
        UserError: it does not accept the arguments it will be called with.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in function_kwargs if name not in parameters and not takes_any]
    if unknown:
        raise UserError(f"reward.function_kwargs.{unknown[0]} is not a parameter of {spec}; it takes {', '.join(parameters)}")
    if "completions" in parameters:
        passed = {"prompts", "completions", *function_kwargs}
        required = tuple(n for n, p in parameters.items() if n not in passed and _must_be_given(p))
        call = partial(_call_trl, function, dict(function_kwargs), None if takes_any else frozenset(parameters))
        return RewardFunction(call=call, style="trl", required_columns=required)
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS), **function_kwargs)
    except TypeError as error:
        raise UserError(
            f"reward.function {spec!r} is called with {', '.join((*ARGUMENTS, *function_kwargs))} by name but takes "
            f"({', '.join(map(str, parameters.values()))}): {error}"
        ) from error
    return RewardFunction(call=partial(_call_upstream, function, dict(function_kwargs)), style="upstream")


def trl_columns(request: RewardRequest) -> dict[str, Any]:
    """The columns a TRL-style function can ask for. `answer` and `solution` name the ground truth unless the row has them."""
    return {
        "answer": request.ground_truth,
        "solution": request.ground_truth,
        "ground_truth": request.ground_truth,
        "data_source": request.data_source,
        **request.extra_info,
    }


def _must_be_given(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variadic


def _call_upstream(function: Callable[..., Any], kwargs: dict[str, Any], request: RewardRequest) -> Any:
    return _finished(
        function(
            data_source=request.data_source,
            solution_str=request.solution_str,
            ground_truth=request.ground_truth,
            extra_info=dict(request.extra_info),  # its own copy: functions may write to it
            **kwargs,
        )
    )


def _call_trl(
    function: Callable[..., Any], kwargs: dict[str, Any], accepted: frozenset[str] | None, request: RewardRequest
) -> Any:
    conversational = not isinstance(request.prompt, str)
    completion = [{"role": "assistant", "content": request.solution_str}] if conversational else request.solution_str
    columns = {name: [value] for name, value in trl_columns(request).items()}
    arguments = {**columns, **kwargs, "prompts": [request.prompt], "completions": [completion]}
    result = _finished(function(**{n: v for n, v in arguments.items() if accepted is None or n in accepted}))
    if not isinstance(result, Sequence) or isinstance(result, str) or len(result) != 1:
        raise TypeError(f"returned {result!r:.80}; a function of (prompts, completions) returns a list with one reward each")
    return result[0]


_loop: asyncio.AbstractEventLoop | None = None


def _finished(result: Any) -> Any:
    """Await a coroutine, on one loop for the life of the process, so that a function may keep its connections."""
    global _loop
    if not inspect.isawaitable(result):
        return result
    if _loop is None:
        _loop = asyncio.new_event_loop()
    return _loop.run_until_complete(result)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"reward.function: there is no file {path} (looked in {Path.cwd()}); give the path of the file")
    path = path.resolve()
    _add_to_path(path.parent)
    # A file may be called like an installed package; its module name must not hide that package.
    spec = importlib.util.spec_from_file_location(f"verl_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"reward.function: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
