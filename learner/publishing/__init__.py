"""Publishing: brings policy versions from the learner into the generators."""
