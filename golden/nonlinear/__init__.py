"""The flash controller's nonlinear units (*LLM Inference in a Flash*, section 3.1.3)."""
