"""Reports: tables, figures and pages made from run records."""
