"""The end of a month: bills beside what was rated, residuals posted, and a proof that holds."""
