"""Fitting a risk calibrator on labelled spans and answers, and validating it. Needs scikit-learn."""
