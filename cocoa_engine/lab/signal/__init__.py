"""The signal study: does layer disagreement separate hallucinated from supported answers, on labelled data?"""
