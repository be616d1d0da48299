"""Reports of the overlap of a corpus with an evaluation set, by item and in all, and of the steps that see it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.corpus.corpus import Corpus
from jaxtrain.data.tracing.contamination import KEPT, Detail, EvalSearch, Items, Overlap
from jaxtrain.data.tracing.document_texts import read_one
from jaxtrain.data.tracing.stretches import Stretch
from jaxtrain.runs.trace_report import counted
from jaxtrain.runs.traced_run import Seen, TracedRun

SHOWN = 20  # items, and SHOWN steps of each document, that are shown as text


@dataclass
class ItemOverlaps:
    """The overlap of all documents with an item."""

    documents: int = 0
    ngrams: set[int] = field(default_factory=set)
    containment: float = 0.0
    longest: int = 0
    most: list[Overlap] = field(default_factory=list)  # the documents that have most of it

    def add(self, overlap: Overlap) -> None:
        """Count a document."""
        self.documents += 1
        self.ngrams |= overlap.ngrams
        self.containment = max(self.containment, overlap.containment)
        self.longest = max(self.longest, overlap.longest)
        self.most = sorted([*self.most, overlap], key=lambda one: (
            -one.longest, -one.containment, one.document.source, one.document.number))[:KEPT]

    def covered(self, size: int) -> int:
        """Return how many words of the item are in matching n-grams of so many words."""
        return len({word for start in self.ngrams for word in range(start, start + size)})


def gathered(found: Iterable[Sequence[Overlap]]) -> dict[int, ItemOverlaps]:
    """Return what was found by item."""
    by_item: dict[int, ItemOverlaps] = {}
    for overlaps in found:
        for one in overlaps:
            by_item.setdefault(one.item, ItemOverlaps()).add(one)
    return by_item


def details(corpus: Corpus, search: EvalSearch, overlaps: Iterable[Overlap]) -> dict[Overlap, Detail]:
    """Return the details of overlaps; each document is read once."""
    found: dict[Overlap, Detail] = {}
    for document, some in groupby(sorted(overlaps, key=_place), key=lambda one: one.document):
        mine = list(some)
        found |= zip(mine, search.details(mine, read_one(corpus, document), corpus.tokenizer), strict=True)
    return found


def _place(overlap: Overlap) -> tuple[str, int]:
    return overlap.document.source, overlap.document.number


def objects(run: TracedRun, search: EvalSearch, by_item: dict[int, ItemOverlaps]) -> Iterator[JsonObject]:
    """Yield an object for each item of the set, in order, and last the summary."""
    items = search.items()
    told = details(run.corpus, search, (one for found in by_item.values() for one in found.most))
    stretches = [Stretch(one.document.source, one.document.start + a, one.document.start + b)
                 for one, detail in told.items() for a, b in detail.tokens]
    seen = iter(run.seen(stretches) if run.batches is not None else [[] for _ in stretches])
    steps = {one: [row for _ in detail.tokens for row in next(seen)] for one, detail in told.items()}
    verdicts: dict[str, int] = {"exact": 0, "near": 0, "clean": 0, "short": 0}
    trained = set()
    for item, line in enumerate(items.lines):
        found = by_item.get(item, ItemOverlaps())
        made = _item(run, items, item, found, told, steps)
        verdicts[made["verdict"]] += 1
        if any(one.get("steps_done") for one in made["found_in"]):
            trained.add(line)
        yield made
    judged = len(items.lines) - verdicts["short"]
    dirty = verdicts["exact"] + verdicts["near"]
    summary: JsonObject = {"items": len(items.lines), **verdicts, "share": dirty / judged if judged else 0.0,
                           "ngram": search.ngram, "near_threshold": search.threshold}
    yield summary | ({"seen_by_steps_done": len(trained)} if run.workdir else {})


def _item(run: TracedRun, items: Items, item: int, found: ItemOverlaps, told: dict[Overlap, Detail],
          steps: dict[Overlap, list[Seen]]) -> JsonObject:
    size, words = items.size(item), len(items.texts[item])
    verdict = ("exact" if found.ngrams else "near" if found.documents else "clean" if items.judged(item) else "short")
    made: JsonObject = {"item": items.lines[item], "id": items.names[item], "words": words, "verdict": verdict,
                        "ngrams": [len(found.ngrams), max(0, words - size + 1)],
                        "covered": found.covered(size) / max(1, words), "longest": found.longest,
                        "containment": found.containment, "documents": found.documents, "found_in": []}
    for one in found.most:
        entry: JsonObject = {"document": one.document.name, "origin": one.document.origin(run.corpus),
                             "longest": one.longest, "containment": one.containment,
                             "resemblance": told[one].resemblance, "tokens": [list(span) for span in told[one].tokens]}
        if run.batches is not None:
            entry["steps_done"], entry["steps_to_come"] = counted(run, steps[one])
        made["found_in"].append(entry)
    return made


def as_text(run: TracedRun, made: Sequence[JsonObject]) -> Iterator[str]:
    """Yield lines about the items that are not clean, and about all."""
    *items, summary = made
    dirty = [one for one in items if one["found_in"]]
    for one in dirty[:SHOWN]:
        name = f"item {one['item']}" + (f" ({one['id']})" if one["id"] else "")
        what = (f"{one['ngrams'][0]} of {one['ngrams'][1]} n-grams, {one['covered']:.0%} of its words, the longest run "
                f"{one['longest']} words" if one["verdict"] == "exact" else
                f"a document has {one['containment']:.0%} of its windows of 5 words")
        yield f"{name}: {one['verdict']}; {what}; in {one['documents']:,} document{'s' * (one['documents'] != 1)}"
        for place in one["found_in"][:3]:
            where = f"  document {place['document']}: {place['origin']}"
            yield where + (f"; {_steps(run, place)}" if run.batches is not None else "")
    if len(dirty) > SHOWN:
        yield f"and {len(dirty) - SHOWN:,} more items; --json lists all"
    ngram = summary["ngram"]
    whole = ", or all of an item that has fewer," if any(
        one["verdict"] == "exact" and one["words"] < ngram for one in items) else ""
    yield (f"{summary['items']:,} items: {summary['exact']:,} share {ngram} words in a row{whole} with a training "
           f"document, {summary['near']:,} are near duplicates, {summary['clean']:,} are clean, "
           f"{summary['short']:,} too short to judge")


def _steps(run: TracedRun, place: JsonObject) -> str:
    done, future = place["steps_done"], place["steps_to_come"]
    if not done and not future:
        return "no step sees it"
    shown = ", ".join(map(str, [*done, *future][:SHOWN]))
    more = " ..." if len(done) + len(future) > SHOWN else ""
    return f"seen at {shown}{more}" + (f" ({len(done):,} done, {len(future):,} to come)" if run.workdir else "")
