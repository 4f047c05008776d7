"""Parts of the learner."""
