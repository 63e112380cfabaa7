"""Write the prompts that the demo heads are trained on: python calibration/recipes/training_prompts.py OUTPUT.jsonl

Two sources, both free to ship: forms and topics written for this purpose, and the docstrings of Python's standard
library (PSF licence). The committed file was made with Python 3.11; another version gives other docstrings.
"""

import importlib
import inspect
import json
import random
import sys

TOPICS = {
    "stem": """photosynthesis; plate tectonics; black holes; the water cycle; vaccines; enzymes; gravity; electric motors;
        the periodic table; natural selection; antibiotics; lasers; the greenhouse effect; DNA replication; friction;
        acids and bases; volcanoes; tides; the immune system; semiconductors; radio waves; the speed of light; osmosis;
        earthquakes; the ozone layer; batteries; refraction; entropy; the nervous system; nuclear fusion; probability;
        prime numbers; the Pythagorean theorem; derivatives; compound interest; binary numbers; sound waves; stars;
        combustion; magnetism; ecosystems; the moon's phases; rust; steel; concrete; solar panels; wind turbines; glaciers""",
    "humanities": """the printing press; ancient Rome; the Silk Road; the Renaissance; democracy; jazz; Greek tragedy;
        the French Revolution; Buddhism; existentialism; impressionism; the Industrial Revolution; haiku; feudalism;
        the Cold War; stoicism; cave paintings; the Enlightenment; human rights; opera; colonialism; trade unions;
        the Olympic Games; mythology; archaeology; utilitarianism; the Ottoman Empire; ancient Egypt; the Black Death;
        Gothic architecture; the Aztecs; folk music; propaganda; migration; satire; the alphabet; tea; coffee; chess""",
    "life": """baking bread; a vegetable garden; learning to swim; saving money; a job interview; a long train journey;
        moving to a new city; a morning routine; caring for a dog; writing a thank-you note; a birthday party; sleep;
        running a marathon; public speaking; a small bookshop; repairing a bicycle; camping in the rain; a school library;
        a neighbourhood market; learning the piano; time management; teamwork; a healthy breakfast; recycling; a budget;
        photography; remote work; travelling alone; a family recipe; cleaning a kitchen; stress; patience; friendship""",
    "fiction": """a lighthouse keeper; a lost robot; a talking cat; a dragon who is afraid of fire; a baker on the moon;
        a clock that runs backwards; two rival gardeners; a ship in a storm; a hidden door; a letter without a sender;
        a village under the sea; a musician who cannot hear; a map of dreams; the last tree; a detective in winter;
        an old bridge; a boy who collects shadows; a queen without a crown; a night train; a forest that whispers""",
    "software": """a stack; a queue; binary search; recursion; a hash table; sorting a list; reading a CSV file;
        regular expressions; unit tests; version control; a REST API; SQL joins; an index in a database; caching;
        threads; a linked list; palindromes; counting words; the Fibonacci sequence; validating an email address;
        parsing JSON; merging two dictionaries; a to-do list; a calculator; a guessing game; temperature conversion;
        matrix multiplication; finding duplicates; reversing a string; prime factors; a binary tree; error handling""",
}

FORMS = {
    "stem": [
        "Explain {} to a ten-year-old.",
        "What are three common misunderstandings about {}?",
        "Write a short paragraph on {} for a textbook, with one example.",
        "Why does {} matter in everyday life? Give two reasons.",
        "Give me a step-by-step explanation of {}.",
        "Make a quiz of five questions about {} and give the answers.",
        "Compare what scientists knew about {} two hundred years ago with what they know today.",
        "Summarize the most important facts about {} as a bulleted list.",
    ],
    "humanities": [
        "Tell me about the history of {}.",
        "What lasting influence did {} have? Answer in two paragraphs.",
        "Discuss one argument for and one against the importance of {}.",
        "How would you introduce {} to a visitor in a museum?",
        "List five key terms connected with {} and define each in one sentence.",
        "Write an outline for an essay on {}.",
        "What questions should a student ask about {}?",
    ],
    "life": [
        "Give me practical advice on {}.",
        "Write a friendly email to a colleague about {}.",
        "What should a beginner know about {}? Use a numbered list.",
        "Write a blog post introduction about {}.",
        "Describe the pros and cons of {} in a table.",
        "I feel nervous about {}. What can I do?",
        "Plan a week of small steps for {}.",
        "Pretend you are a coach and talk to me about {}.",
    ],
    "fiction": [
        "Write a short story about {}.",
        "Write a poem about {}.",
        "Describe {} in vivid detail.",
        "Write the opening scene of a play about {}.",
        "Continue this sentence as a story: Nobody in town had ever believed in {}, until",
        "Write a dialogue between a child and {}.",
        "Act as {} and introduce yourself.",
        "Write a letter addressed to {}.",
    ],
    "software": [
        "Write a Python program that demonstrates {}.",
        "Explain {} with a short code example.",
        "What mistakes do beginners make with {}?",
        "Write a JavaScript function for {} and explain it line by line.",
        "How would you test code that deals with {}?",
        "When should I use {} and when not?",
    ],
}

NUMBERS = [
    "A shop sells {a} notebooks at {b} dollars each and {c} pens at {d} dollars each. How much does it earn?",
    "If a train travels {a} kilometers in {b} hours, what is its average speed? Show your work.",
    "What is {a} times {b}? Explain how to compute it by hand.",
    "A recipe for {b} people needs {a} grams of flour. How much is needed for {c} people?",
    "Solve for x: {b}x + {c} = {a}.",
    "I have {a} apples and give away {b} of them each day. After how many days do I have none left?",
    "List all the numbers between {b} and {c} that are divisible by {d}.",
    "What is {d} percent of {a}? Give a short explanation.",
]

MODULES = """
    argparse array ast base64 bisect calendar collections colorsys concurrent.futures configparser contextlib copy
    csv datetime decimal difflib dis email.message enum fileinput fnmatch fractions functools gc getpass glob gzip
    hashlib heapq html http.client imaplib inspect io ipaddress itertools json keyword linecache locale logging lzma
    mailbox math mimetypes operator optparse os os.path pathlib pickle platform pprint queue random re sched secrets
    selectors shelve shlex shutil signal smtplib socket sqlite3 statistics string struct subprocess tarfile tempfile
    textwrap threading timeit token tokenize trace traceback turtle types unicodedata unittest urllib.parse
    urllib.request uuid warnings wave weakref xml.etree.ElementTree zipfile zlib
""".split()  # noqa: SIM905

DOCSTRING_FORMS = [
    "In Python, what does `{name}` do? Its documentation says: {line}",
    "Write a short example that uses `{name}` from Python's standard library.",
    "Rewrite this documentation for a beginner: {line}",
    "Explain in plain words: {line}",
    "When would I use `{name}` in a program?",
    "Turn this description into a function with a docstring and a test: {line}",
]


def words(text):
    return [" ".join(item.split()) for item in text.split(";")]


def topic_prompts():
    for domain, topics in TOPICS.items():
        for topic in words(topics):
            for form in FORMS[domain]:
                yield domain, form.format(topic)


def number_prompts(rng):
    for form in NUMBERS:
        for _ in range(24):
            b = rng.randint(2, 12)
            yield "math", form.format(a=rng.randint(20, 600), b=b, c=b + rng.randint(5, 40), d=rng.randint(2, 9))


def docstring_prompts(rng):
    seen = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name, member in sorted(vars(module).items()):
            if name.startswith("_") or not (inspect.isroutine(member) or inspect.isclass(member)):
                continue
            line = " ".join((inspect.getdoc(member) or "").split("\n\n")[0].split())
            if not 30 <= len(line) <= 300 or line in seen:
                continue
            seen.add(line)
            yield "docstrings", rng.choice(DOCSTRING_FORMS).format(name=f"{module_name}.{name}", line=line)


def main(output, num_docstrings=900):
    rng = random.Random(0)
    docstrings = list(docstring_prompts(rng))
    rows = [*topic_prompts(), *number_prompts(rng), *rng.sample(docstrings, num_docstrings)]
    rng.shuffle(rows)  # so that the first thousand of them are a fair sample of all
    with open(output, "w", encoding="utf8") as file:
        for i, (domain, content) in enumerate(rows, 1):
            row = {"id": f"training-{i:04}", "domain": domain, "split": "train"}
            row["messages"] = [{"role": "user", "content": content}]
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
