"""Plots, report, run information and silence of third parties."""

import json
import re
import subprocess
import sys
import textwrap

import matplotlib.image
import numpy as np
import pytest

import verl
from verl.config.schema import TrackingConfig
from verl.data.types import Prompt, Segment, Trajectory
from verl.errors import UserError
from verl.observe.logger import RunLogger
from verl.observe.plots import Bar, draw_runs, plot_comparison, plot_run, smooth
from verl.observe.records import read_run
from verl.observe.report import build_report, main, report_table
from verl.observe.run_info import run_info


def make_run(folder, steps=30, **more):
    segment = Segment(token_ids=[1, 2], is_model=True, logprobs=[0.0, 0.0], policy_versions=[0, 0])
    prompt = Prompt(uid="a:0", messages=({"role": "user", "content": "2 < 3 & so on?"},), ground_truth="5")
    answer = Trajectory(
        prompt=prompt,
        prompt_ids=[1],
        segments=(segment,),
        finish_reason="stop",
        group_id=0,
        sample_index=0,
        response_text="<b>5</b>",
        reward=1.0,
    )
    with RunLogger(folder, TrackingConfig(backends=[], plots=False), steps) as logger:
        for step in range(1, steps + 1):
            values = {"reward/mean": step / steps, "actor/policy_kl": 0.01, "timing_s/gen": 0.5, "timing_s/step": 1.0}
            logger.log(step, {**values, **more})
            logger.log_samples(step, [answer])
        logger.log(steps, {"val/accuracy": 0.75}, kind="val")
    run_info(folder, "algorithm:\n  adv_estimator: grpo\n")
    return folder


def titles(figure):
    return [axes.get_title(loc="left").split("  ")[0] for axes in figure.axes if axes.get_visible()]


def test_smooth_follows_without_lag_by_hand():
    assert smooth([1.0] * 12, 2) == pytest.approx([1.0] * 12)
    # Weights 1/2, 1, 1/2; the ends have only two of them.
    assert smooth([0.0, 0.0, 4.0, 0.0], 1) == pytest.approx([0.0, 1.0, 2.0, 4 / 3])
    line = [float(step) for step in range(40)]
    assert smooth(line, 3)[5:35] == pytest.approx(line[5:35])


def test_plot_run_draws_the_panels_the_run_has(tmp_path):
    run = make_run(tmp_path / "ppo", **{"critic/vf_loss": 0.1})
    assert titles(draw_runs([read_run(run)])) == ["Reward", "Held-out accuracy", "Policy KL", "Value loss", "Time of a step"]
    (path,) = plot_run(run)
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[1] > 1000 and np.ptp(pixels[..., :3]) > 0.5


def test_a_single_step_can_be_drawn_and_runs_laid_over_each_other(tmp_path):
    one, two = make_run(tmp_path / "one", steps=1), make_run(tmp_path / "two", **{"critic/vf_loss": 0.1})
    assert plot_run(one)[0].stat().st_size > 5000
    figure = draw_runs([read_run(one), read_run(two)])
    assert titles(figure) == ["Reward", "Held-out accuracy", "Policy KL", "Value loss"]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["one", "two"]


def test_comparison_bars(tmp_path):
    bars = [Bar(name="base", value=2, low=1, high=4), Bar(name="RL", value=78, low=73, high=82)]
    path = plot_comparison(tmp_path / "new" / "stages.png", {"Accuracy, %": bars, "Steps": bars}, title="stages")
    assert path.stat().st_size > 5000


def test_report_is_one_page_that_needs_nothing_else(tmp_path):
    runs = [make_run(tmp_path / "first"), make_run(tmp_path / "second", **{"made/up": 1.0})]
    page = build_report(runs, tmp_path / "out" / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page) and "data:image/png;base64," in page
    assert "0.03333 → 1" in page and "mean reward of the step" in page and "adv_estimator: grpo" in page
    assert "&lt;b&gt;5&lt;/b&gt;" in page and "2 &lt; 3 &amp; so on?" in page and "<b>5" not in page
    assert "not in the table of metrics" in page


def test_report_command_prints_a_table_that_fits_a_terminal(tmp_path, capsys):
    runs = [make_run(tmp_path / "grpo-smollm2-135m"), make_run(tmp_path / "ppo-smollm2-135m")]
    main([str(run) for run in runs])
    out = capsys.readouterr().out
    assert (runs[0] / "report.html").is_file() and f"report: {runs[0] / 'report.html'}" in out
    table = report_table(runs)
    assert max(len(line) for line in table.splitlines()) <= 80
    assert re.search(r"reward/mean +0\.03333 → 1 +0\.03333 → 1 +reward", table) and "ppo-smollm2-135m: step 30" in table


def test_a_folder_without_a_run_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"is no run folder \(it has no metrics\.jsonl\)"):
        plot_run(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="has not finished a step yet"):
        build_report([tmp_path], tmp_path / "report.html")


def test_run_info_keeps_one_entry_a_start(tmp_path):
    run_info(tmp_path, "a: 1\n")
    run_info(tmp_path, "a: 2\n")
    assert (tmp_path / "config.yaml").read_text() == "a: 2\n"
    starts = json.loads((tmp_path / "run.json").read_text())
    assert len(starts) == 2 and starts[1]["verl"] == verl.__version__
    assert {"torch", "transformers"} <= starts[1]["packages"].keys()
    assert starts[1]["hardware"]["cpu_cores"] >= 1 and starts[1]["python"] == sys.version.split()[0]


LOUD = """
import warnings, logging, os
{before}
from verl.observe.console import quiet_third_party
quiet_third_party()
import transformers
from transformers.utils import logging as t
t.get_logger("transformers.models").warning("a transformers warning")
for _ in t.tqdm(range(2)): pass
warnings.warn_explicit("a torch warning", UserWarning, "x.py", 1, module="torch.nn.functional")
logging.getLogger("torch.distributed").warning("a torch log line")
warnings.warn_explicit("ours", UserWarning, "x.py", 1, module="verl.trainer")
"""


@pytest.mark.parametrize("before", ["", "import transformers"])
def test_third_parties_are_silent_and_we_are_not(before):
    script = textwrap.dedent(LOUD.format(before=before))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "" and done.stderr.strip() == "x.py:1: UserWarning: ours"


def test_a_verbosity_that_the_user_has_set_wins(monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "warning")
    script = textwrap.dedent(LOUD.format(before=""))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "a transformers warning" in done.stderr
