"""An answer's risk made visible: in terminals, as HTML, as Markdown, as figures. Each form is one module here."""
