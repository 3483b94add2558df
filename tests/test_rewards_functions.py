"""Reward functions: how they are found, which shapes they may have, and how their results are read."""

import asyncio
import math
from fractions import Fraction

import numpy as np
import pytest

from verl.config.schema import RewardConfig
from verl.errors import UserError
from verl.rewards.functions import RewardRequest, load_reward_function, resolve_reward_function
from verl.rewards.outcome import read_result

MESSAGES = [{"role": "user", "content": "q"}]
REQUEST = RewardRequest(data_source="d", solution_str="abc", ground_truth=3, extra_info={"index": 7}, prompt=MESSAGES)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a reward file into a working directory of its own; returns its `file:name` spec."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nonexistent", *__import__("sys").path])

    def write_file(source: str, name: str = "", file: str = "my_reward.py") -> str:
        (tmp_path / file).write_text(source)
        return f"{tmp_path / file}:{name}" if name else str(tmp_path / file)

    return write_file


def custom(function, **kwargs):
    return resolve_reward_function(RewardConfig(type="custom", function=function, function_kwargs=kwargs))


def test_upstream_signature_gets_every_argument(write):
    spec = write("def f(data_source, solution_str, ground_truth, extra_info=None, bonus=0):\n    return locals()", "f")
    assert custom(spec, bonus=2)(REQUEST) == {
        "data_source": "d",
        "solution_str": "abc",
        "ground_truth": 3,
        "extra_info": {"index": 7},
        "bonus": 2,
    }


def test_name_defaults_to_compute_score_and_relative_paths_work(write):
    write("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.5")
    assert custom("my_reward.py")(REQUEST) == 0.5
    assert custom("my_reward")(REQUEST) == 0.5, "a module in the working directory"
    assert custom("my_reward:compute_score")(REQUEST) == 0.5


def test_installed_module_and_neighbouring_import(write):
    assert custom("verl.rewards.accuracy:compute_score", format_score=0.2)(REQUEST)["score"] == 0.0
    write("VALUE = 0.75", file="neighbour_of_reward.py")
    spec = write("from neighbour_of_reward import VALUE\ndef compute_score(**kwargs):\n    return VALUE")
    assert custom(spec)(REQUEST) == 0.75


def test_async_functions_keep_one_event_loop(write):
    spec = write(
        "import asyncio\nasync def f(data_source, solution_str, ground_truth, extra_info):\n"
        "    await asyncio.sleep(0)\n    return id(asyncio.get_running_loop())",
        "f",
    )
    function = custom(spec)
    assert function(REQUEST) == function(REQUEST)
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


def test_trl_function_gets_lists_and_columns(write):
    function = custom(write("def f(prompts, completions, **columns):\n    return [(prompts, completions, columns)]", "f"))
    prompts, completions, columns = function(REQUEST)
    assert function.style == "trl"
    assert prompts == [MESSAGES]
    assert completions == [[{"role": "assistant", "content": "abc"}]]
    assert columns == {"answer": [3], "solution": [3], "ground_truth": [3], "data_source": ["d"], "index": [7]}


def test_trl_function_on_plain_text_and_with_named_columns(write):
    function = custom(
        write("async def f(completions, answer, weight=1):\n    return [len(completions[0]) * weight + answer[0]]", "f"), weight=2
    )
    request = RewardRequest(data_source="", solution_str="abc", ground_truth=0, extra_info={"answer": 10}, prompt="q")
    assert function(request) == 16, "the row's own answer goes before the ground truth"
    assert function.required_columns == ("answer",)


def test_trl_function_that_returns_no_list_is_named(write):
    with pytest.raises(TypeError, match="returns a list with one reward each"):
        custom(write("def f(completions, **kwargs):\n    return 1.0", "f"))(REQUEST)


def test_accuracy_is_a_reward_function_too():
    function = resolve_reward_function(RewardConfig(format_score=0.1, answer_format="strict"))
    request = RewardRequest(data_source="", solution_str="#### 4", ground_truth="3")
    assert function(request) == {"score": 0.1, "acc": 0.0, "pred": "4"}


GOOD = "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1"


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("import no_such_module_here", "", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("def f(:", "f", "cannot be imported: SyntaxError"),
        ("raise SystemExit(3)", "f", "cannot be imported: SystemExit: 3"),
        (GOOD, "compute_scores", "there is no 'compute_scores' in .*it defines compute_score"),
        ("f = 3", "f", "is a int, not a function"),
        ("def f(solution_str, ground_truth): pass", "f", "is called with data_source, .* but takes"),
        ("def f(data_source, solution_str, ground_thruth, extra_info): pass", "f", "takes .*ground_thruth"),
    ],
)
def test_a_function_that_cannot_work_gives_one_line(write, source, name, message):
    with pytest.raises(UserError, match=message) as error:
        custom(write(source, name))
    assert "\n" not in str(error.value) and "reward.function" in str(error.value)


def test_unknown_keyword_missing_file_and_missing_module(write):
    with pytest.raises(UserError, match=r"reward\.function_kwargs\.bonsu is not a parameter of"):
        custom(write(GOOD), bonsu=1)
    with pytest.raises(UserError, match=r"there is no file nowhere\.py"):
        load_reward_function("nowhere.py:f", {})
    with pytest.raises(UserError, match="No module named 'nowhere'"):
        load_reward_function("nowhere.rewards:f", {})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "magic"}, "reward.type is 'magic'"),
        ({"type": "custom"}, "reward.function is not set"),
        ({"function": "a.py:f"}, "reward.type is accuracy; set reward.type=custom"),
        ({"function_kwargs": {"a": 1}}, "reward.function_kwargs is set"),
        ({"answer_format": "loose"}, "reward.answer_format is 'loose'"),
        ({"timeout_s": 0.0}, "reward.timeout_s is 0.0"),
        ({"workers": -1}, "reward.workers is -1"),
        ({"scale": math.nan}, "reward.scale is nan"),
    ],
)
def test_a_section_that_cannot_work(section, message):
    with pytest.raises(UserError, match=message):
        resolve_reward_function(RewardConfig(**section))


@pytest.mark.parametrize(
    ("result", "score"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.array(2), 2.0),
        (Fraction(1, 4), 0.25),
    ],
)
def test_numbers_are_scores(result, score):
    assert read_result(result).score == score
    assert read_result({"score": result}).score == score


def test_parts_are_the_finite_numbers_of_a_dict():
    outcome = read_result({"score": 0.5, "acc": True, "pred": "18", "length": np.int64(3), "ratio": math.nan, "none": None})
    assert outcome.score == 0.5 and outcome.parts == {"score": 0.5, "acc": 1.0, "length": 3.0}
    assert outcome.failure is None


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (None, "returned None (NoneType), not a number"),
        ("1.0", "returned '1.0' (str), not a number"),
        ([1.0], "returned [1.0] (list), not a number"),
        (np.array([1.0, 2.0]), "not a number"),
        (math.nan, "returned nan"),
        (-math.inf, "returned -inf"),
        ({"acc": 1.0}, "a dict without 'score', with acc"),
        ({"score": None}, "returned None (NoneType), not a number"),
    ],
)
def test_anything_else_is_a_failure_with_its_reason(result, reason):
    outcome = read_result(result)
    assert outcome.score is None and outcome.kind == "bad_result" and reason in outcome.failure
