"""Customer-service environments with a policy, a database and a simulated customer.

`desk` contains the base class of the desks, `customer` the two kinds of customer, `scenarios` the drawing of scenarios,
`plan` their correct conversations; `retail` and `airline` are the desks.
"""
