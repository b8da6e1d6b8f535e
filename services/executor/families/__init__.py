"""What is declared once of each family of models."""
