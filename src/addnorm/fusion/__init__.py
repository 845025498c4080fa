"""A model's Add & Norms made fused, reversibly, with proof that nothing changed."""
