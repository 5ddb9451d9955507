"""The guards of processes, ports and files, taken out one by one; see docs/security.md."""

from __future__ import annotations

import importlib
from typing import Any

from boundaries import process_cases as cases
from boundaries.mutation import Bound, Code, Later, Mutant

from penstock.gpu_worker.edge import ingress
from penstock.gpu_worker.model.loading import fingerprint
from penstock.gpu_worker.model.structured import chat_template, compile_server, render_loop
from penstock.gpu_worker.monitoring import health
from penstock.producer.gateway.access import key_access
from penstock.producer.gateway.openai.fields.field_table import FieldTable
from penstock.shared.scripts import replies
from penstock.shared.settings import sources


def loading(name: str) -> Any:
    return importlib.import_module(f"penstock.gpu_worker.model.{name}")


def gate(old: str, new: str) -> Later:
    return Later(lambda: Code(loading("loading.load_gate").check_config, old, new))


PROCESS_MUTANTS = (
    # entries of the ingress
    Mutant(
        "large entries on the event loop", Bound(ingress, "_PARSED_AT_ONCE", 10**9),
        cases.large_entries,
    ),
    # the compile process
    Mutant(
        "constraints of any stack",
        Code(compile_server._compile, "setup.stack_bytes", "256 << 20"), cases.long_chain,
    ),
    Mutant(
        "constraints of any memory",
        Code(compile_server._compile, "_limit_memory(setup)", "pass"), cases.memory_limit,
    ),
    Mutant(
        "constraints that compile for ever",
        Code(compile_server._compile, "thread.join(setup.limit_s)", "thread.join()"),
        cases.long_compilation,
    ),
    Mutant(
        "compilers that hold the interpreter lock",
        Code(compile_server._limit_time, "setup.limit_s + 1)\n", "0)\n"),
        cases.compilation_by_the_clock,
    ),
    Mutant(
        "compilers of any CPU time",
        Code(compile_server._limit_time, "int(setup.limit_s) + 1", "resource.RLIM_INFINITY"),
        cases.compilation_by_the_cpu,
    ),
    # the render process of chat templates
    Mutant(
        "templates that compute for ever",
        Code(render_loop.serve_renders, "setitimer(signal.ITIMER_PROF, RENDER_CPU_S)",
             "setitimer(signal.ITIMER_PROF, 0)"),
        cases.long_loop,
    ),
    Mutant(
        "templates of any memory", Code(compile_server._limit_memory, "setup.memory_bytes",
        "2**40"), cases.wide_text,
    ),
    Mutant(
        "texts of any length from templates", Bound(render_loop, "MAX_RENDERED_CHARS", 10**9),
        cases.long_text,
    ),
    Mutant(
        "private names in templates",
        Code(chat_template._check_public, 'name.startswith("_")', "False"), cases.private_name,
    ),
    # files of a checkpoint
    Mutant(
        "weights files with a header of any length",
        Code(fingerprint._header, "count > min(_MOST_HEADER_BYTES, size)", "False"),
        cases.header_of_any_length,
    ),
    Mutant(
        "weights files with any header",
        Code(fingerprint._middles, "(ValueError, TypeError, KeyError, AttributeError)",
             "ValueError"),
        cases.header_of_another_shape,
    ),
    Mutant(
        "code of a checkpoint",
        Later(lambda: Bound(loading("loading.checkpoint"), "LOCAL",
                            {"local_files_only": True, "trust_remote_code": True})),
        cases.checkpoints_code,
    ),
    Mutant(
        "encoder-decoders", gate('getattr(config, "is_encoder_decoder", False)', "False"),
        cases.model_refused("encoder-decoder", model_type="t5"),
    ),
    Mutant(
        "models that write nothing", gate("type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING",
        "False"), cases.model_refused("no causal language model", model_type="vit"),
    ),
    Mutant(
        "layers of any type", gate("if foreign:", "if False:"),
        cases.model_refused("linear_attention", model_type="qwen3_next"),
    ),
    Mutant(
        "logits of other tokens",
        Later(lambda: Code(loading("forward.batch").forward_logits,
                           "logits.shape[1] != len(step.rows)", "False")),
        cases.rows_that_were_not_asked_for,
    ),
    # settings
    Mutant(
        "settings of any value",
        Code(sources.load_settings, "raise ConfigurationError(_explain(error, given)) from None",
             "return Settings()"),
        cases.setting_out_of_range,
    ),
    # the metrics port
    Mutant(
        "any path of the metrics port",
        Code(health.HealthServer.__init__, 'self.path in ("/healthz", "/readyz")', "True"),
        cases.other_path,
    ),
    Mutant(
        "silent clients of the metrics port",
        Code(health.HealthServer.__init__, "timeout = _CLIENT_TIMEOUT_S", "timeout = None"),
        cases.silent_client,
    ),
    # API keys and fields of the gateway
    Mutant(
        "as many wrong keys as fit",
        Code(key_access.KeyAccess._look_up, "len(self._cache) > _MOST_CACHED", "False"),
        cases.many_wrong_keys,
    ),
    Mutant(
        "parameters that do not exist",
        Code(FieldTable.read, "raise self._unknown(name)", "continue"), cases.unknown_parameter,
    ),
    Mutant(
        "parameters out of range",
        Code(FieldTable.read, "self._checked(field, value)", "value"),
        cases.parameter_out_of_range,
    ),
    # Redis' replies to scripts
    Mutant(
        "damaged entries of a log", Code(replies._claim, "except ProtocolError:",
        "except KeyError:"), cases.damaged_log,
    ),
    Mutant(
        "gaps of a log",
        Code(replies.Claim.intact.fget, "chunk.start != at", "False"), cases.log_with_a_gap,
    ),
    Mutant(
        "usage that is no number",
        Code(replies.Used.unpack, "or not all(word.isdigit() for word in words)", ""),
        cases.usage_that_is_none,
    ),
)  # fmt: skip
