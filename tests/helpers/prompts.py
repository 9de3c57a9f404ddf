"""Varied prompts for the real model: what a user asks, plus shapes that are hard on a tokenizer or a cache."""


def chat(user: str, system: str = "You are a helpful AI assistant.") -> str:
    """One question in the ChatML format of the embedded model."""
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


_NOTES = "".join(
    f"Entry {day}: at {6 + day % 5}:{day % 60:02d} the keeper of the lighthouse wrote that the wind came from the "
    f"{('north', 'east', 'south', 'west')[day % 4]}, that {day * 7 % 23} boats passed and that the lamp burnt "
    f"{day * 11 % 40 + 3} litres of oil.\n"
    for day in range(1, 24)
)

LONG = chat(f"{_NOTES}\nWrite a short poem about this lighthouse.")
"""A context of about 1,000 tokens of the embedded model."""

PROMPTS: dict[str, str] = {
    "question": chat("What is the capital of Australia?"),
    "code": "def fibonacci(n):\n    ",
    "json": chat('Give me a JSON object with the keys "name" and "age" of a person you make up.'),
    "story": "Once upon a time, in a village by the sea, there lived",
    "chinese": "中国的首都是",
    "arabic": "عاصمة مصر هي",
    "emoji": chat("Write a happy birthday message with many emojis 🎉🎂🥳👩‍👩‍👧‍👦"),
    "one word": "The",
    "white space": "\n\n   \t",
    "system prompt": chat("Who are you?", system="You are a pirate. Answer in one short sentence."),
}
