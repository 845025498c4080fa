"""What happens at every sublayer, step by step; the numbers, their files and pictures."""
