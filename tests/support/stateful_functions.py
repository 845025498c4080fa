"""Modules that keep state in classes and functions, each in another way."""

import functools

from support.stateful_models import STATES, Fresh, State


@functools.lru_cache
def counter():
    return [0]


class CachedFunction(Fresh):
    def setup(self):
        counter.cache_clear()

    def grow(self):
        counter()[0] += 1

    def count(self):
        return counter()[0]


class CachedMethod(Fresh):
    @functools.cache  # noqa: B019
    def cell(self):
        return [0]

    def grow(self):
        self.cell()[0] += 1

    def count(self):
        return self.cell()[0]


class ClassAttribute(Fresh):
    n = 0

    def setup(self):
        type(self).n = 0

    def grow(self):
        type(self).n += 1

    def count(self):
        return self.n


class DefaultArgument(Fresh):
    def setup(self):
        self.grow.__defaults__[0].clear()

    def grow(self, cache=[]):  # noqa: B006
        cache.append(1)

    def count(self):
        return len(self.grow.__defaults__[0])


class FunctionAttribute(Fresh):
    def setup(self):
        vars(type(self).grow).pop("n", None)

    def grow(self):
        type(self).grow.n = self.count() + 1

    def count(self):
        return getattr(type(self).grow, "n", 0)


def collect(value, values=[]):  # noqa: B006
    values.append(value)
    return values


class DefaultOfFunction(Fresh):
    def setup(self):
        collect.__defaults__[0].clear()

    def grow(self):
        collect(1)

    def count(self):
        return len(collect.__defaults__[0])


class Closure(Fresh):
    def setup(self):
        n = 0

        def grow():
            nonlocal n
            n += 1

        self.grow, self.count = grow, lambda: n


class Partial(Fresh):
    def setup(self):
        self.grow = functools.partial(lambda seen, key: seen.update({len(seen): key}), {}, key=1)

    def count(self):
        return len(self.grow.args[0])


class ReplacedClass(State):
    def value(self, x):
        self.__class__ = OtherClass
        return 1.0


class OtherClass(ReplacedClass):
    def value(self, x):
        return 2.0


del STATES["OtherClass"]
