"""Work on whole stores for the people who run them: what a store holds, and what recovery has cut from it."""
