"""What a network found, not only where: the concepts that a class is made of."""
