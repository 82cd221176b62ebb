"""Say where the data are that the studies of tweets and of sentence pairs read.

Run: ``python -m bench.data``, the end of ``make bench-data``.
"""

from __future__ import annotations

from bench.data.tweets import find_tweets
from bench.data.wordnet import find_nouns

if __name__ == "__main__":
    print(f"tweets: {find_tweets()}\nnouns: {find_nouns()}")
