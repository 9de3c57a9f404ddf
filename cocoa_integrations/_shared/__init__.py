"""What the adapters share: settings, loading, metadata, log-probabilities, limits, tracing, workers, async streams."""
