"""Constraints that crash a compiler, or never end, are refused; nothing else is harmed by them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from model.engine_run import Bench
from model.families import save_family
from waiting import is_running, wait_until

from penstock.gpu_worker.model.build import build_model
from penstock.gpu_worker.model.loading.loader import LoadedModel, load_model
from penstock.gpu_worker.model.structured.compile_sandbox import CompileSandbox, UnsafeConstraint
from penstock.gpu_worker.model.structured.constraint_compiler import ConstraintCompiler
from penstock.gpu_worker.model.structured.matcher import ConstraintError
from penstock.shared.errors import InvalidRequest, ModelError
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Reason
from penstock.shared.settings import load_settings

ROOT = Path(__file__).resolve().parents[3]
TOKENIZER = ROOT / "gpu_worker/demo_model/target/tokenizer.json"


def rules(count: int) -> str:
    """A grammar in which each rule is the next."""
    chain = "".join(f"r{i}: r{i + 1}\n" for i in range(count))
    return f'start: r0\n{chain}r{count}: "a"\n'


def definitions(link: str, count: int) -> str:
    """A schema in which each definition is made of the next."""
    chain: dict[str, Any] = {f"d{count}": {"type": "string"}}
    for i in range(count):
        after = {"$ref": f"#/$defs/d{i + 1}"}
        chain[f"d{i}"] = {
            "properties": {"type": "object", "properties": {"a": after}},
            "items": {"type": "array", "items": after},
            "anyOf": {"anyOf": [after, {"type": "null"}]},
        }[link]
    return json.dumps({"$ref": "#/$defs/d0", "$defs": chain})


CRASHING = {
    "rules": ("grammar", rules(3000)),
    "properties": ("json_schema", definitions("properties", 1200)),
    "items": ("json_schema", definitions("items", 1500)),
    "anyOf": ("json_schema", definitions("anyOf", 1500)),
}
ENDLESS_TEMPLATE = "{{ 9 ** 999999999 }}"
ENDLESS = "start: " + " ".join(['"a"?'] * 30_000)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[CompileSandbox]:
    sandbox = new_sandbox()
    yield sandbox
    sandbox.close()


def new_sandbox(**limits: Any) -> CompileSandbox:
    return CompileSandbox(TOKENIZER.read_text(), 4096, [0], **{"limit_s": 30.0, **limits})


def children_of(pid: int) -> set[int]:
    """Processes that it has started."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for path in files for child in path.read_text().split()}


@pytest.mark.parametrize("name", CRASHING)
def test_what_overflows_a_stack_is_refused_and_the_next_compiles(
    sandbox: CompileSandbox, name: str
) -> None:
    with pytest.raises(UnsafeConstraint, match="crashed or took more than 4 MiB of stack"):
        sandbox.check(*CRASHING[name])
    sandbox.check("regex", "[a-z]{3}")


@pytest.mark.parametrize("name", CRASHING)
def test_it_does_overflow_the_stack_of_a_thread(name: str) -> None:
    """Without a sandbox each case ends the process: otherwise the test above proves nothing."""
    field, source = CRASHING[name]
    program = f"""
import json, sys, threading
from penstock.gpu_worker.model.structured.matcher import compile_matcher, word_list
words = word_list(open({str(TOKENIZER)!r}).read(), 4096, [0])
source = sys.stdin.read()
threading.stack_size(8 << 20)
thread = threading.Thread(target=compile_matcher, args=(words, {field!r}, source))
thread.start()
thread.join()
"""
    run = subprocess.run([sys.executable, "-c", program], input=source, text=True, check=False)
    assert run.returncode in (-signal.SIGABRT, -signal.SIGSEGV)


def test_a_chain_of_moderate_length_compiles(sandbox: CompileSandbox) -> None:
    sandbox.check("grammar", rules(800))
    for link in ("properties", "items", "anyOf"):
        sandbox.check("json_schema", definitions(link, 300))


def test_what_takes_too_long_is_refused() -> None:
    sandbox = new_sandbox(limit_s=0.2)
    with pytest.raises(UnsafeConstraint, match=r"took more than 0\.2 s: make it smaller"):
        sandbox.check("grammar", ENDLESS)
    sandbox.close()


def test_what_takes_too_much_memory_is_refused() -> None:
    sandbox = new_sandbox(memory_bytes=16 << 20)
    sandbox.check("regex", "[a-z]{3}")
    with pytest.raises(UnsafeConstraint, match="or 16 MiB of memory"):
        sandbox.check("grammar", ENDLESS)
    sandbox.close()


def test_what_the_library_refuses_keeps_its_message(sandbox: CompileSandbox) -> None:
    with pytest.raises(ConstraintError, match="unclosed group") as caught:
        sandbox.check("regex", "(")
    assert not isinstance(caught.value, UnsafeConstraint)


def test_many_at_once_get_their_own_answers(sandbox: CompileSandbox) -> None:
    def refused(number: int) -> bool:
        field, source = ("regex", f"a{{{number}}}") if number % 2 else CRASHING["rules"]
        try:
            sandbox.check(field, source)
        except UnsafeConstraint:
            return True
        return False

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(refused, range(16))) == [True, False] * 8


def test_a_server_that_is_killed_is_replaced() -> None:
    sandbox, before = new_sandbox(), children_of(os.getpid())
    sandbox.check("regex", "a")
    (server,) = children_of(os.getpid()) - before
    os.kill(server, signal.SIGKILL)
    sandbox.check("regex", "b")
    (other,) = children_of(os.getpid()) - before
    assert other != server
    sandbox.close()
    wait_until(lambda: not is_running(other), "the server ends with its sandbox")


def test_its_processes_end_with_their_owner() -> None:
    """Killed while a constraint is being compiled, the owner leaves no process behind."""
    # It compiles ENDLESS, which is too long to be given, and imports no more than it needs.
    program = f"""
from penstock.gpu_worker.model.structured.compile_sandbox import CompileSandbox
sandbox = CompileSandbox(open({str(TOKENIZER)!r}).read(), 4096, [0], limit_s=30.0)
sandbox.check("regex", "a")
print("ready", flush=True)
sandbox.check("grammar", "start: " + '"a"? ' * 30_000)
"""
    started: set[int] = set()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"

        def compiles() -> bool:
            for server in children_of(owner.pid):
                started.update({server}, children_of(server))
            return len([pid for pid in started if is_running(pid)]) >= 2

        wait_until(compiles, "the server has started a process for the constraint")
        owner.kill()
    wait_until(lambda: not any(map(is_running, started)), "all have ended")


# --- chat templates -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
        "{% generation %}{{ raise_exception('no') }}{% endgeneration %}{{ strftime_now('%d') }}",
    ],
)
def test_templates_in_the_language_of_transformers_compile(
    sandbox: CompileSandbox, template: str
) -> None:
    sandbox.check_chat_template(template)


def test_a_malformed_template_is_no_crash(sandbox: CompileSandbox) -> None:
    for template in ("{% for %}", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"):
        with pytest.raises(ConstraintError) as caught:
            sandbox.check_chat_template(template)
        assert not isinstance(caught.value, UnsafeConstraint)


def test_a_template_whose_compiler_never_ends_ends_nothing_else() -> None:
    """Jinja folds constants, and holds the interpreter lock meanwhile."""
    sandbox = new_sandbox(limit_s=3.0)
    with pytest.raises(UnsafeConstraint, match="compiling this one"):
        sandbox.check_chat_template(ENDLESS_TEMPLATE)
    sandbox.check_chat_template("{{ messages }}")
    sandbox.close()


def test_a_tokenizer_that_cannot_be_followed_still_has_its_template_checked() -> None:
    sandbox = CompileSandbox("", 4096, [0], limit_s=30.0)
    sandbox.check_chat_template("{{ messages }}")
    sandbox.close()


def test_a_model_with_such_a_template_is_refused(tmp_path: Path) -> None:
    path = save_family("llama", tmp_path)
    (path / "chat_template.jinja").write_text(ENDLESS_TEMPLATE)
    settings = {
        "model.path": str(path),
        "engine.kv_memory": "8MiB",
        "engine.constraint_timeout_s": 1,
    }
    with pytest.raises(ModelError, match=r"^the chat template in .* is unusable: compiling"):
        build_model(load_settings(settings))


def test_it_prepares_once_and_again_after_its_server_has_ended() -> None:
    sandbox = new_sandbox()
    before = children_of(os.getpid())
    sandbox.prepare()
    (server,) = children_of(os.getpid()) - before
    sandbox.prepare()
    assert children_of(os.getpid()) - before == {server}
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: not is_running(server), "the server's end")
    sandbox.prepare()
    sandbox.check("regex", "[ab]+")
    assert server not in children_of(os.getpid())
    sandbox.close()


# --- beside a model -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Iterator[LoadedModel]:
    model = load_model("demo", device="cpu")
    yield model
    model.close()


def test_the_request_is_refused_by_name_and_with_a_remedy(demo: LoadedModel) -> None:
    compiler = ConstraintCompiler(demo.tokenizer, demo.vocab_size, demo.eos_token_ids)
    field, source = CRASHING["rules"]
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(SamplingOptions(grammar=source))
    assert str(caught.value).startswith(f"{field}: got 'start: r0")
    assert str(caught.value).endswith("nest it less deeply or make it smaller")
    compiler.close()


def test_the_longest_chain_that_passes_can_be_followed(demo: LoadedModel) -> None:
    """What the sandbox lets pass overflows no stack in its masks, either."""
    bench = Bench(demo)
    bench.add("a", [5], grammar=rules(800), max_tokens=20)
    bench.add("b", [5], json_schema=definitions("items", 300), max_tokens=400)
    answers = bench.run()
    assert answers["a"].text == "a"
    assert answers["a"].finish is not None
    assert answers["a"].finish.reason is Reason.STOP
    assert answers["b"].text.startswith("[")
