"""The engine without a framework: the risk of an answer, competing candidates, a stream, a batch, and a scored text.

python examples/engine.py
"""

from __future__ import annotations

from cocoa_engine import CocoaEngine


def main() -> None:
    """Ask the embedded model. Pass a model name to ``from_pretrained`` to use another one."""
    engine = CocoaEngine.from_pretrained()

    answer = engine.chat([{"role": "user", "content": "Who wrote the novel Dune?"}], max_new_tokens=40)
    print("answer:", answer.text)
    for claim in answer.check_these():
        print(f"check {claim.text!r}: risk {claim.risk:.2f}, competing: {', '.join(claim.competing) or 'nothing'}")

    for span in answer.spans:
        for number, candidate in enumerate(span.candidates):
            kept = "kept" if number == span.chosen else ""
            greedy = "greedy's" if candidate.is_greedy else ""
            values = f"log p {candidate.log_prob:7.2f}  score {candidate.score:7.2f}"
            print(f"  {candidate.text!r:24} {values}  {kept} {greedy}")

    print("\nstream: ", end="")
    with engine.stream("The three primary colours are", max_new_tokens=16, stop="\n") as stream:
        for span in stream:
            print(f"[{span.text}]", end="", flush=True)

    print("\n\nbatch:")
    prompts = ["The capital of France is", "The capital of Italy is"]
    for prompt, generation in zip(prompts, engine.generate_batch(prompts, max_new_tokens=8), strict=True):
        print(f"  {prompt}{generation.text!r}  mean risk {generation.mean_risk:.2f}")

    print("\nscore:")
    for text in (" Paris.", " Berlin."):
        span = engine.score("The capital of France is", text).spans[0]
        print(f"  {text!r:10} log p {span.log_prob:7.2f}  ConMLDS {span.con_mlds:.3f}  fMLDS {span.f_mlds:.3f}")


if __name__ == "__main__":
    main()
