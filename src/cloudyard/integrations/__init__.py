"""Outside frameworks that use a yard: one module or package for each, installed by an extra of the same name.

They know the SDK alone, as any user's program would, and the framework; none of them knows another.
"""
