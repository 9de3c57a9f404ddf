"""What the documentation site generates from the code, and the hooks of MkDocs. Not part of the site."""
