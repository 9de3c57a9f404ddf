"""Does the disagreement of layers tell hallucinated answers from supported ones? Measured on labelled data."""
