"""Customer service with a policy, a database and a customer who answers.

`desk` has what the desks share, `customer` the two kinds of customer, `plan` how scenarios are written; `retail` and
`airline` are the desks.
"""
