"""What is said of an answer beside its text, in the same words wherever it is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cocoa_engine.config import CocoaConfig
from cocoa_engine.rendering.scale import RiskScale
from cocoa_engine.results import Generation
from cocoa_engine.spans import Candidate, Measured, Span

METRIC_NAMES = {"f_mlds": "fMLDS", "con_mlds": "ConMLDS"}
FINISH_REASONS = {
    "stop": "stopped as asked",
    "eos": "ended by the model",
    "length": "cut off by max_new_tokens",
    "risk": "stopped by max_risk",
}

REACHED = "reached max_risk"

_FIGURES = {
    "log_prob": ("log p", ".2f"),
    "con_mlds": ("ConMLDS", ".3f"),
    "f_mlds": ("fMLDS", ".3f"),
    "score": ("score", ".2f"),
    "penalty": ("penalty", ".2f"),
}
_SAID_OTHERWISE = {"risk", "self_information"}

# C0 controls but tab and newline become their Unicode pictures, DEL likewise, C1 controls a replacement character;
# what would turn the order of the letters around, unseen, is named.
_CONTROLS: dict[int, int | str] = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_CONTROLS |= {code: f"<U+{code:04X}>" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def safe(text: str) -> str:
    """The text with its control characters made visible: nothing that shows it must obey what a model wrote."""
    return text.translate(_CONTROLS)


def visible(text: str) -> str:
    """A span's text on one line, its outer spaces and its line ends visible."""
    text = safe(text).replace("\n", "\\n").replace("\t", "\\t")
    if not text:
        return "(end)"
    core = text.strip(" ")
    before = len(text) - len(text.lstrip(" ")) if core else len(text)
    after = len(text) - before - len(core)
    return "␣" * before + core + "␣" * after


def edges(text: str) -> tuple[str, str, str]:
    """A text cut into the white space before it, itself, and the white space after it, which stay unmarked."""
    core = text.strip()
    if not core:
        return text, "", ""
    start = text.index(core)
    return text[:start], core, text[start + len(core) :]


def before(text: str, offset: int, length: int = 24) -> str:
    """The last words before an offset, on one line."""
    words = safe(" ".join(text[:offset].split()))
    if len(words) <= length:
        return words
    last = words[-length:]
    return "…" + (last.partition(" ")[2] or last)


def names(generations: Sequence[Generation]) -> list[str]:
    """What tells answers apart: their methods, and whatever else differs in their settings."""
    configs = [one.config for one in generations]
    differing = [
        name
        for name in CocoaConfig.model_fields
        if name != "method" and any(getattr(config, name) != getattr(configs[0], name) for config in configs)
    ]
    return [", ".join([one.method, *(f"{name} {getattr(one, name)}" for name in differing)]) for one in configs]


def scale_words(generations: Sequence[Generation], scale: RiskScale) -> str:
    """What the levels of a scale mean in these answers."""
    if scale.calibrated:
        return "Risk, calibrated (0 to 1):"
    metric = " and ".join(dict.fromkeys(METRIC_NAMES[one.config.metric] for one in generations))
    own = len(generations) == 1 and scale == RiskScale.of(generations[0].spans)
    texts = "this text's own range" if own else "the range of these texts"
    words = f"Risk by raw {metric}, not a probability, relative to {texts}:"
    if not scale.empty:
        return words
    return f"{words} {scale.low:.3f} throughout." if any(one.spans for one in generations) else f"{words} no spans."


def summary_words(generation: Generation) -> str:
    """The size and the cost of an answer, why it ended, and its risk as a whole if that is known, in one line."""
    usage = generation.usage
    counts = (
        count(usage.completion_tokens, "token"),
        count(len(generation.spans), "span"),
        count(usage.risk_points, "risk point"),
        count(usage.forward_passes, "forward pass", "forward passes"),
    )
    reason = generation.finish_reason
    end = f", {FINISH_REASONS.get(reason, reason)}" if reason else ""
    risk = generation.answer_risk
    whole = "" if risk is None else f" Risk of the answer as a whole: {risk:.3f}, calibrated."
    return f"{generation.config.method}: {', '.join(counts)}{end}.{whole}"


def risk_words(generation: Generation) -> str:
    """The highest and the mean risk of an answer, and what they are."""
    config = generation.config
    kind = "calibrated" if generation.calibrated else f"raw {METRIC_NAMES[config.metric]}"
    return f"highest risk {generation.max_risk:.3f}, mean {generation.mean_risk:.3f} ({kind})"


def kind_words(span: Span) -> str:
    """How a span came to be."""
    if span.candidates:
        return f"kept of {count(len(span.candidates), 'candidate')} that competed"
    return "a text scored as given" if span.kind == "given" else "no other token competed"


def mark(level: int, reached: bool) -> str:
    """The risk of a span as it is written into a text: its level, and ``!`` if it reached ``max_risk``; or nothing."""
    return f"{level}!" if reached else str(level or "")


def any_reached(generations: Iterable[Generation]) -> bool:
    """Whether a span of these answers reached ``max_risk``, so that a legend has to say how that is drawn."""
    return any(span.reaches_max_risk for one in generations for span in one.spans)


def figures(one: Measured, config: CocoaConfig) -> list[tuple[str, str, str]]:
    """Every single figure of a span or a candidate: its name, its value, what it means.

    A figure that a later version adds is listed under its field's name.
    """
    rows = []
    if isinstance(one, Span):
        what = "calibrated, 0 to 1" if one.calibrated else f"raw {METRIC_NAMES[config.metric]}, not a probability"
        rows.append(("risk", f"{one.risk:.3f}", what))
    kind = type(one)
    meanings = {name: field.description for name, field in kind.model_fields.items()}
    meanings |= {name: field.description for name, field in kind.model_computed_fields.items()}
    for name, meaning in meanings.items():
        value = getattr(one, name)
        if isinstance(value, float) and name not in _SAID_OTHERWISE:
            title, form = _FIGURES.get(name, (name.replace("_", " "), ".3f"))
            rows.append((title, format(value, form), meaning or ""))
    rows.append(("tokens", str(len(one.token_ids)), ""))
    if one.token_entropies:
        mean = sum(one.token_entropies) / len(one.token_entropies)
        rows.append(("entropy", f"{mean:.2f}", "Mean over its tokens, in nats."))
    return rows


def taken(candidate: Candidate, kept: bool) -> str:
    """Who took a candidate: it was ``kept``, ``greedy`` decoding would have taken it, ``both``, or neither."""
    return "both" if kept and candidate.is_greedy else "kept" if kept else "greedy" if candidate.is_greedy else ""


def count(number: int, one: str, many: str = "") -> str:
    """A number and its noun."""
    return f"{number} {one if number == 1 else many or one + 's'}"
