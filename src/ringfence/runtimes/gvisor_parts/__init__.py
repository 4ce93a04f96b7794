"""What the ``gvisor`` driver is made of: the link to the agent, the wall's plan, measuring, images.

Does not belong here: anything that another runtime needs too.
"""
