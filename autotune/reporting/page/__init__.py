"""A report as a page: one self-contained page of HTML, or Markdown for a pull request."""
