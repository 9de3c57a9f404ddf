"""Needles and hay for finding retrieval heads: sentences to hide, and text to hide them in."""

from __future__ import annotations

from typing import NamedTuple


class Needle(NamedTuple):
    """A sentence that is unrelated to the text around it, and the question that asks for it."""

    text: str
    question: str


NEEDLES = (
    Needle(
        "The best thing to do in Harrowgate on a rainy afternoon is to count the brass clocks in the old mill.",
        "What is the best thing to do in Harrowgate on a rainy afternoon?",
    ),
    Needle(
        "Old Captain Velmor kept his silver compass under the third step of the lighthouse stairs.",
        "Where did old Captain Velmor keep his silver compass?",
    ),
    Needle(
        "The secret of the baker's black bread is a spoonful of pine honey and two days of patience.",
        "What is the secret of the baker's black bread?",
    ),
)

HAY = (
    "A garden changes slowly, and most of what happens in it happens where nobody looks.",
    "In spring the soil warms from the top, and the worms that spent the winter deep below begin to rise.",
    "People who keep notes from year to year find that the same plants flower a week earlier after a mild winter.",
    "Water is the first worry of every summer, because a dry week in June does more harm than a dry month in August.",
    "Some gardeners leave the fallen leaves on the beds, since they keep the ground moist and feed it when they rot.",
    "Others prefer bare earth, which is easier to weed and warms faster, but which the wind and the rain carry off.",
    "Trees are planted in autumn, when their roots still have time to settle before the frost.",
    "A young tree wants a stake for two years and then none, for a stem that never bends never grows strong.",
    "Fruit is picked when it parts from the branch with a light turn of the hand.",
    "Roses are cut back hard when the willow catkins open, and again, lightly, after their first bloom.",
    "A hedge gives shelter to birds, slows the wind, and needs an hour of work in each month of summer.",
    "Tools last for decades if they are cleaned in the evening and hung up in a dry place.",
    "Compost is ready when it smells of forest and nothing in it can be recognised any more.",
    "In winter there is little to do but to sharpen the spade, read the seed lists and wait for the light.",
)
