"""What people trip over, found in settings that do not contradict each other.

Tried with accelerate 1.15, except for two that are only read in its code, as they need an fp8 GPU and DeepSpeed:
`fp8_falls_to_fp16` and `deepspeed_file`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from halfstep.doctor import accelerate_file, environment
from halfstep.doctor.settings import Setting, Source
from halfstep.finding import Finding

NARROW = ("fp16", "bf16", "fp8")


class Lookup:
    """Settings by source and key."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources
        self._found: dict[tuple[str, str], Setting] = {
            (s.kind, s.key): s for source in sources for s in source.precision
        }

    def get(self, kind: str, key: str) -> Setting | None:
        return self._found.get((kind, key))

    def value(self, kind: str, key: str) -> object:
        setting = self.get(kind, key)
        return setting.value if setting else None

    def of_accelerate(self) -> list[Setting]:
        """The settings that decide accelerate's precision: its file's, its variable's."""
        keys = (("accelerate", "mixed_precision"), ("accelerate", "fp16"), ("environment", environment.MIXED_PRECISION))
        return [setting for key in keys if (setting := self._found.get(key))]

    def accelerate_text(self) -> str:
        return next((source.text for source in self.sources if source.kind == "accelerate"), "")

    def asks(self, *precisions: str) -> Setting | None:
        return next((s for s in self.of_accelerate() if s.claim and s.claim.meaning in precisions), None)


def facts(sources: Sequence[Source]) -> list[Finding]:
    """Every finding that the settings give rise to."""
    lookup = Lookup(sources)
    return [finding for check in _CHECKS for finding in check(lookup)]


def default_file_note(variables: Mapping[str, str]) -> list[Finding]:
    """A note where `accelerate launch` would find a file by itself that was not given here."""
    place = accelerate_file.default_place(variables)
    if not place.is_file():
        return []
    evidence = f"{place} exists and was not compared; accelerate launch reads it unless it is given --config_file"
    return [Finding("accelerate.default_file", "note", evidence, f"add --accelerate {place}")]


def _fp16_on_a_cpu(lookup: Lookup) -> Iterator[Finding]:
    fp16 = lookup.asks("fp16")
    variable = lookup.get("environment", environment.USE_CPU)
    in_file = lookup.get("accelerate", "use_cpu")
    forced = in_file if in_file and in_file.value is True else None
    if variable and str(variable.value).lower() in environment.ON:
        forced = variable
    if fp16 and forced:
        evidence = f"{fp16} with {forced} ({forced.where}): accelerate reports fp16 and computes in fp32, silently"
        yield Finding("accelerate.fp16_on_cpu", "warning", evidence, "write mixed_precision: bf16, or 'no'")


def _no_without_quotes(lookup: Lookup) -> Iterator[Finding]:
    setting, text = lookup.get("accelerate", "mixed_precision"), lookup.accelerate_text()
    if setting and accelerate_file.reads_a_boolean(text):
        evidence = (
            f"{setting} without quotes ({setting.where}): accelerate launch reads a boolean and stops in an error"
        )
        yield Finding("accelerate.unquoted_no", "warning", evidence, "write mixed_precision: 'no'")


def _no_distributed_type(lookup: Lookup) -> Iterator[Finding]:
    place = next((s.place for s in lookup.sources if s.kind == "accelerate"), None)
    if place and not lookup.get("accelerate", accelerate_file.DISTRIBUTED):
        evidence = f"{place} has no {accelerate_file.DISTRIBUTED}, without which accelerate launch refuses the file"
        yield Finding("accelerate.no_distributed_type", "warning", evidence, "add the line  distributed_type: 'NO'")


def _word_of_the_variable(lookup: Lookup) -> Iterator[Finding]:
    variable = lookup.get("environment", environment.MIXED_PRECISION)
    if variable and str(variable.value) not in accelerate_file.WORDS:
        evidence = f"{variable}: under plain python accelerate knows small letters only, and computes in fp32, silently"
        fix = f"export {variable.key}={str(variable.value).lower()}"
        yield Finding("accelerate.variable_case", "warning", evidence, fix)


def _sums_in_16_bits(lookup: Lookup) -> Iterator[Finding]:
    asked = lookup.asks(*NARROW)
    if asked and asked.claim and lookup.value("accelerate", accelerate_file.DISTRIBUTED) == "FSDP":
        name = "bf16" if asked.claim.meaning == "fp8" else asked.claim.meaning
        evidence = f"distributed_type: FSDP with {asked}: accelerate also sums gradients over processes in {name}"
        fix = (
            "in the script, give Accelerator an FSDP plugin whose mixed_precision_policy has reduce_dtype=torch.float32"
        )
        yield Finding("accelerate.fsdp_reduces_narrow", "warning", evidence, fix)


def _not_read(lookup: Lookup) -> Iterator[Finding]:
    settings = [lookup.get("accelerate", f"fsdp_config.{key}") for key in accelerate_file.POLICIES]
    downcast = lookup.get("accelerate", "downcast_bf16")
    settings += [downcast] if downcast and downcast.value not in (False, "no", "NO") else []
    for setting in filter(None, settings):
        evidence = f"{setting} ({setting.where}): accelerate launch does not read this key from its file"
        tpu = setting.leaf == "downcast_bf16"
        fix = (
            "use accelerate launch --downcast_bf16 (TPU only)" if tpu else "set the policy in the script's FSDP plugin"
        )
        yield Finding("accelerate.key_not_read", "warning", evidence, fix)


def _two_files_for_deepspeed(lookup: Lookup) -> Iterator[Finding]:
    word = lookup.get("accelerate", "mixed_precision")
    file = lookup.get("accelerate", "deepspeed_config.deepspeed_config_file")
    if word and file:
        evidence = f"{word} ({word.where}) beside deepspeed_config_file: accelerate refuses to run with both"
        yield Finding("accelerate.deepspeed_file", "warning", evidence, "delete mixed_precision from accelerate's file")


def _fp8_may_be_fp16(lookup: Lookup) -> Iterator[Finding]:
    asked = lookup.asks("fp8")
    if asked:
        evidence = f"{asked}: on a GPU below compute capability 8.9 accelerate takes fp16 instead"
        yield Finding("accelerate.fp8_falls_to_fp16", "note", evidence, "write mixed_precision: bf16 for such a GPU")


def _tf32_behind_fp32(lookup: Lookup) -> Iterator[Finding]:
    variable = lookup.get("environment", environment.TORCH_TF32)
    if variable and variable.value == "1":
        evidence = f"{variable}: what torch calls an fp32 matrix product is a tf32 one on NVIDIA GPUs since Ampere"
        yield Finding("torch.tf32_override", "warning", evidence, f"unset {variable.key}")


def _who_wins(lookup: Lookup) -> Iterator[Finding]:
    if lookup.of_accelerate():
        evidence = (
            "who wins in accelerate: Accelerator(mixed_precision=...) in the script, then accelerate launch "
            f"--mixed_precision, then its file. {environment.MIXED_PRECISION} counts only under plain python, "
            "where the file is not read"
        )
        fix = "start with accelerate launch, and leave mixed_precision out of the script"
        yield Finding("accelerate.order", "note", evidence, fix)


def _not_under_accelerate(lookup: Lookup) -> Iterator[Finding]:
    if lookup.of_accelerate() and any(source.halfstep for source in lookup.sources):
        evidence = (
            "halfstep train obeys its recipe alone; accelerate's settings matter where a script of yours runs too"
        )
        yield Finding("recipe.not_accelerate", "note", evidence, "nothing, if you only use halfstep train")


_CHECKS: tuple[Callable[[Lookup], Iterator[Finding]], ...] = (
    _no_without_quotes,
    _no_distributed_type,
    _fp16_on_a_cpu,
    _word_of_the_variable,
    _sums_in_16_bits,
    _not_read,
    _two_files_for_deepspeed,
    _fp8_may_be_fp16,
    _tf32_behind_fp32,
    _who_wins,
    _not_under_accelerate,
)
