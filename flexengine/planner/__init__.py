"""From a model, a request and a machine to a Plan: predicts bytes and seconds, and chooses. Runs without a GPU."""
