"""Words to values, exit codes, and that nothing slow is imported before it is needed. The run itself is a stand-in."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from msmodelslim import __version__, cli, device
from msmodelslim.cli import main
from msmodelslim.errors import UnsupportedError

RECIPE = """
apiversion: modelslim_v1
metadata: {config_id: mine}
spec:
  process: [{type: linear_quant, qconfig: {weight: {dtype: int8, scope: per_channel}}}]
  save: [{type: ascendv1_saver}]
"""


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, SimpleNamespace]]:
    """What the command would run: ("quantize" or "rehearse", job), in order."""
    found: list[tuple[str, SimpleNamespace]] = []
    service = ModuleType("msmodelslim.quant_service")
    vars(service).update(
        QuantJob=SimpleNamespace,
        quantize=lambda job: found.append(("quantize", job)),
        rehearse=lambda job: found.append(("rehearse", job)),
    )
    monkeypatch.setitem(sys.modules, "msmodelslim.quant_service", service)
    return found


@pytest.fixture
def paths(t_dense: Path, tmp_path: Path) -> list[str]:
    return ["--model_path", str(t_dense), "--save_path", str(tmp_path / "out"), "--device", "cpu"]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return str(tmp_path / "mine.yaml")


@pytest.fixture
def run_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `msmodelslim inspect x` do something else."""

    def replace(action: Any) -> None:
        def inspect(args: object) -> Any:
            "Stand-in."
            return action()

        monkeypatch.setattr(cli, "inspect", inspect)

    return replace


def usage(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The last lines of a usage error."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    head, _, message = err.partition("error: ")
    assert head.startswith("usage: msmodelslim")
    return message.rstrip("\n")


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "msmodelslim", *words], capture_output=True, text=True, env=os.environ | environment
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        [],
        ["quant", "--help"],
        ["--version"],
        ["quant", "-V"],
        ["quant", "--nope"],
        ["analyze", "-h"],
        ["analyze", "attn"],
    ],
)
def test_help_version_and_usage_import_nothing_slow(words: list[str]) -> None:
    script = (
        "import sys; from msmodelslim.cli import main; main(sys.argv[1:])\n"
        "print(sorted({'torch', 'transformers', 'pydantic', 'yaml', 'rich', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_lists_the_commands_and_ends_well() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("quant", "analyze", "verify", "inspect", "eval"):
        assert f"    {command} " in done.stdout
    assert run().stdout == done.stdout


@pytest.mark.parametrize("words", [["--version"], ["-V"], ["quant", "--version"], ["eval", "x", "-V"]])
def test_version_is_answered_anywhere(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 0
    assert re.fullmatch(rf"msmodelslim {re.escape(__version__)}( \(git [0-9a-f]{{7}}\))?\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["qant"], "'qant' is no command; write quant"),
        (["--debug"], "--debug is no option; there are --help, --version"),
        (
            ["quant", "--model_pth", "x", "--save-pth", "y"],
            "--model_pth is no option; write --model_path\n  --save_pth is",
        ),
        (["quant", "--model", "x"], "--model is no option; write --model_type"),
        (["quant", "--model_path", "x"], "the following arguments are required: --save_path"),
        (
            ["quant", "--quant_type", "w8a9"],
            "argument --quant_type: 'w8a9' is not a quant type; write 'w8a8' (of w8a8, ",
        ),
        (
            ["quant", "--quant_type", "w8a8", "--config", "x.yaml"],
            "argument --config_path/--config: not allowed with argument --quant_type",
        ),
        (["quant", "--trust_remote_code", "maybe"], "argument --trust_remote_code: 'maybe' is neither True nor False"),
        (["quant", "--threads", "0"], "argument --threads: '0' is not a whole number from 1 on"),
        (["quant", "--device_id", "one"], "argument --device_id: 'one' is not a whole number"),
        (["quant", "--log_level", "loud"], "argument --log_level: invalid choice: 'loud'"),
        (["quant", "--dry_ru"], "--dry_ru is no option; write --dry_run"),
        (["verify"], "the following arguments are required: DIR"),
        (["eval", "x", "--windows", "many"], "argument --windows: 'many' is not a whole number from 1 on"),
    ],
)
def test_usage_errors_exit_2_and_name_the_nearest(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert usage(capsys, *words).startswith(said)


def test_a_job_holds_what_the_words_said(jobs: list[Any], t_dense: Path, tmp_path: Path, recipe: str) -> None:
    words = f"quant --model_path {t_dense} --save_path {tmp_path}/out --config_path {recipe} --model_type Llama-tiny"
    words += " --device cpu --device_id 0 --trust_remote_code --dataset d.jsonl --debug --overwrite --threads 3"
    assert main(words.split()) == 0
    [(what, job)] = jobs
    assert what == "quantize"
    assert vars(job) == {
        "model_path": t_dense,
        "save_path": tmp_path / "out",
        "recipe_text": RECIPE,
        "recipe_source": recipe,
        "model_type": "Llama-tiny",
        "device": "cpu",
        "device_ids": (0,),
        "trust_remote_code": True,
        "dataset": "d.jsonl",
        "debug": True,
        "overwrite": True,
        "threads": 3,
        "plugins": (),
    }


def test_what_is_not_said_has_its_default(jobs: list[Any], paths: list[str], recipe: str) -> None:
    assert main(["quant", *paths, "--config", recipe]) == 0
    [(_, job)] = jobs
    assert (job.model_type, job.dataset, job.threads) == (None, None, None)
    assert (job.trust_remote_code, job.debug, job.overwrite) == (False, False, False)


@pytest.mark.parametrize(
    "name", ["model_path", "save_path", "config_path", "trust_remote_code", "dry_run", "log_level"]
)
def test_every_option_may_be_spelt_with_hyphens(jobs: list[Any], paths: list[str], recipe: str, name: str) -> None:
    words = ["quant", *paths, "--config_path", recipe, "--trust_remote_code=yes", "--dry_run", "--log_level=error"]
    spelt = [word.replace(f"--{name}", f"--{name.replace('_', '-')}") for word in words]
    assert spelt != words
    assert main(spelt) == main(words) == 0
    assert jobs[0] == jobs[1]
    assert jobs[0][0] == "rehearse"


@pytest.mark.parametrize(
    ("words", "trusted"),
    [([], False), (["--trust_remote_code"], True), (["--trust_remote_code", "TRUE"], True)]
    + [(["--trust_remote_code", word], False) for word in ("False", "no", "off")],
)
def test_trust_may_be_bare_or_a_word(
    jobs: list[Any], paths: list[str], recipe: str, words: list[str], trusted: bool
) -> None:
    assert main(["quant", *paths, "--config_path", recipe, *words]) == 0
    assert jobs[0][1].trust_remote_code is trusted


@pytest.mark.parametrize("words", [["--device", "npu", "--device_id", "0", "1"], ["--device", "npu:0,1"]])
def test_both_forms_of_devices_are_read(
    jobs: list[Any], paths: list[str], recipe: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "present", lambda: {"npu": 2, "cpu": 4})
    assert main(["quant", *paths, "--config_path", recipe, *words]) == 0
    assert (jobs[0][1].device, jobs[0][1].device_ids) == ("npu", (0, 1))


def test_an_absent_device_is_one_line_that_says_what_is_there(
    jobs: list[Any], paths: list[str], recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "present", lambda: {"cpu": 1})
    assert main(["quant", *paths, "--config_path", recipe, "--device", "cuda:3"]) == 1
    assert capsys.readouterr().err.startswith("error: cuda:3 is not on this machine; it has cpu:0")
    assert not jobs


def test_the_recipe_chosen_and_why_are_printed(
    jobs: list[Any], paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quant", *paths, "--quant_type", "W8A8", "--tag", "vllm-ascend"]) == 0
    model, recipe, why, others = capsys.readouterr().out.splitlines()
    assert model == "model:  llama (family llama)"
    assert recipe.startswith("recipe: w8a8_ascend (") and recipe.endswith("practices/dense/w8a8_ascend.yaml)")
    assert why == "why:    verified for llama with vllm-ascend"
    assert others.startswith("others: w8a8_dynamic_ascend (vLLM-Ascend")
    assert jobs[0][1].recipe_text.startswith("# Smoothed, then input ranges are calibrated")


def test_no_type_is_w8a8_and_says_so(jobs: list[Any], paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quant", *paths]) == 0
    assert "why:    no quant type was given, so w8a8; verified for llama" in capsys.readouterr().out


def test_a_fall_back_needs_yes_and_never_asks(
    jobs: list[Any], paths: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    words = ["quant", *paths, "--quant_type", "w4a16", "--tags", "MindIE"]
    assert main(words) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: there is no practice for w4a16 for llama with MindIE; w4a16 is the nearest, but ")
    assert "give --yes to take it" in err
    assert not jobs
    assert main([*words, "--yes"]) == 0
    out, err = capsys.readouterr()
    assert "why:    a fall-back that --yes accepted: it is verified with vLLM CPU transformers only" in out
    assert "WARNING a fall-back that --yes accepted" in err


def test_a_misspelt_model_type_is_an_error(
    jobs: list[Any], paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quant", *paths, "--model_type", "lama"]) == 1
    assert "error: model type 'lama'" in capsys.readouterr().err
    assert not jobs


def test_the_default_family_is_taken_when_asked_for(jobs: list[Any], paths: list[str]) -> None:
    assert main(["quant", *paths, "--model_type", "default", "--quant_type", "w8a16"]) == 0
    assert jobs[0][1].model_type == "default"


def test_a_wrong_device_recipe_and_model_are_told_at_once(
    jobs: list[Any], paths: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.yaml").write_text(RECIPE.replace("spec:", "spec:\n  runnr: auto").replace("int8", "int9"))
    words = ["--device", "npu:0", "--config_path", str(tmp_path / "wrong.yaml"), "--model_type", "lama"]
    assert main(["quant", *paths[:4], *words]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: several things are wrong:\n  npu:0 is not on this machine")
    for said in ("wrong.yaml:5: spec.runnr: unknown key", "weight.dtype: 'int9' is not known", "'lama' begins like no"):
        assert said in err
    assert jobs == []


def test_a_wrong_path_and_a_wrong_recipe_are_told_at_once_in_a_line_each(
    jobs: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.yaml").write_text(RECIPE.replace("int8", "int9"))
    words = ["--model_path", str(tmp_path / "gone"), "--save_path", str(tmp_path / "out")]
    assert main(["quant", *words, "--config_path", str(tmp_path / "wrong.yaml"), "--device", "cpu"]) == 1
    title, path, *recipe = capsys.readouterr().err.splitlines()
    assert title == "error: several things are wrong:"
    assert path.startswith(f"  --model_path {tmp_path / 'gone'} does not exist; give the directory of a checkpoint")
    assert recipe and all("'int9' is not known here; write 'int8'" in line for line in recipe)
    assert jobs == []


def test_unsafe_paths_are_refused_before_anything_is_imported(t_dense: Path) -> None:
    script = "import sys; from msmodelslim.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    words = ["quant", "--model_path", str(t_dense), "--save_path", f"{t_dense}/"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    assert done.stdout == "1 False\n"
    assert done.stderr.startswith("error: --save_path ")
    assert "is the same directory as --model_path" in done.stderr


def test_eval_hands_over_what_the_words_said(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    stand_in = ModuleType("msmodelslim.perplexity")
    vars(stand_in)["eval_main"] = lambda *args, **named: seen.append((*args, named))
    monkeypatch.setitem(sys.modules, "msmodelslim.perplexity", stand_in)
    words = "out --text a.txt --windows 4 --window-length 64 --device cpu:0 --threads 2 --trust-remote-code"
    assert main(["eval", *words.split()]) == 0
    assert main(["eval", "out", "--device", "cpu"]) == 0
    assert seen == [
        (Path("out"), Path("a.txt"), 4, 64, "cpu", {"threads": 2, "device_index": 0, "trust_remote_code": True}),
        (Path("out"), None, 32, 512, "cpu", {"threads": None, "device_index": 0, "trust_remote_code": False}),
    ]


def test_verify_and_inspect_hand_over_their_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    stand_in = ModuleType("msmodelslim.artifact")

    def verify(path: Path, source: Path | None) -> int:
        seen.append((path, source))
        return 0 if source is None else 1

    vars(stand_in)["verify_main"] = verify
    vars(stand_in)["inspect_directory"] = lambda *args: seen.append(args)
    monkeypatch.setitem(sys.modules, "msmodelslim.artifact", stand_in)
    assert [main(["verify", "out"]), main(["verify", "out", "--source", "in"]), main(["inspect", "out"])] == [0, 1, 0]
    assert seen == [(Path("out"), None), (Path("out"), Path("in")), (Path("out"),)]


def test_a_users_error_is_one_message_and_debug_adds_the_traceback(
    capsys: pytest.CaptureFixture[str], run_of: Any
) -> None:
    def fail() -> None:
        error = UnsupportedError("it is too large", "make it smaller")
        error.add_note("at layer 3")
        raise error

    run_of(fail)
    assert main(["inspect", "x"]) == 1
    assert capsys.readouterr().err == "error: it is too large; make it smaller\n  at layer 3\n"
    assert main(["inspect", "x", "--debug"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):")
    assert err.endswith("error: it is too large; make it smaller\n  at layer 3\n")


def test_a_defect_of_ours_keeps_its_traceback(run_of: Any) -> None:
    run_of(lambda: {}["no"])
    with pytest.raises(KeyError):
        main(["inspect", "x"])


@pytest.mark.parametrize(
    ("words", "variable", "level"),
    [
        ([], None, logging.INFO),
        ([], "debug", logging.DEBUG),
        ([], "WARNING", logging.WARNING),
        (["-q"], "debug", logging.WARNING),
        (["-q", "-v"], "error", logging.DEBUG),
        (["-q", "--debug"], None, logging.DEBUG),
        (["-v", "--debug", "--log_level", "error"], "debug", logging.ERROR),
        (["-v"], "nonsense", logging.DEBUG),
    ],
)
def test_the_most_explicit_word_decides_the_log_level(
    run_of: Any, monkeypatch: pytest.MonkeyPatch, words: list[str], variable: str | None, level: int
) -> None:
    monkeypatch.delenv(cli.LOG_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(cli.LOG_VARIABLE, variable)
    seen = []
    run_of(lambda: seen.append(logging.getLogger("msmodelslim").level))
    assert main(["inspect", "x", *words]) == 0
    assert seen == [level]


def test_a_log_level_nobody_knows_is_told(
    run_of: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cli.LOG_VARIABLE, "loud")
    run_of(lambda: None)
    assert main(["inspect", "x"]) == 1
    said = "error: MSMODELSLIM_LOG_LEVEL is 'loud'; write one of debug, info, warning, error\n"
    assert capsys.readouterr().err == said


def test_log_lines_name_their_level_and_the_logger_is_left_as_it_was(
    run_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("msmodelslim")
    before = (list(logger.handlers), logger.level)
    run_of(lambda: logging.getLogger("msmodelslim.somewhere").warning("three layers are float"))
    assert main(["inspect", "x"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", "WARNING three layers are float\n")
    assert (list(logger.handlers), logger.level) == before


def test_a_reader_that_leaves_is_no_error() -> None:
    script = (
        "import sys\nfrom msmodelslim import cli\n"
        "def inspect(args):\n  'x'\n  for i in range(100000): print('line')\n"
        "cli.inspect = inspect\nsys.exit(cli.main(['inspect', 'x']))"
    )
    done = subprocess.run(
        f'{sys.executable} -c "$SCRIPT" | head -n 1; echo ${{PIPESTATUS[0]}}',
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        env=os.environ | {"SCRIPT": script},
    )
    assert (done.stdout, done.stderr) == ("line\n141\n", "")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    """A command that waits, and says so, until it is stopped."""
    script = (
        "import sys, time\nfrom msmodelslim import cli\n"
        "def inspect(args):\n"
        "  'Stand-in.'\n"
        "  try:\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "  finally:\n    time.sleep(0.3)\n    print('cleaned up', flush=True)\n"
        "cli.inspect = inspect\nsys.exit(cli.main(['inspect', 'x']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")]
)
def test_a_signal_cleans_up_and_has_its_exit_code(
    sleeper: subprocess.Popen[str], number: int, code: int, said: str
) -> None:
    sleeper.send_signal(number)
    assert sleeper.communicate(timeout=60) == ("cleaned up\n", said)
    assert sleeper.returncode == code


def test_a_second_sigterm_does_not_break_the_cleaning_up(sleeper: subprocess.Popen[str]) -> None:
    sleeper.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    sleeper.send_signal(signal.SIGTERM)
    assert sleeper.communicate(timeout=60) == ("cleaned up\n", "terminated\n")
    assert sleeper.returncode == 143


def test_handlers_are_put_back(run_of: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run_of(lambda: None)
    assert main(["inspect", "x"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before
