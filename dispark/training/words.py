"""Words and sentence forms that training prompts are made of; written for this project, free of any test suite's text.

Nothing but data: see prompts.py for how they are put together.
"""

from __future__ import annotations

# fmt: off
NAMES = (
    "Ada", "Amir", "Anika", "Bruno", "Carla", "Chen", "Dario", "Edith", "Farid", "Greta", "Hana", "Igor", "Jonas",
    "Kemal", "Leila", "Marek", "Nadia", "Oskar", "Petra", "Quentin", "Rosa", "Samir", "Tessa", "Umut", "Vera", "Wanda",
    "Xenia", "Yusuf", "Zoe",
)
ITEMS = (
    "apples", "bricks", "candles", "coins", "cups", "eggs", "flowers", "jars of honey", "keys", "lamps", "letters",
    "marbles", "notebooks", "oranges", "pencils", "plates", "postcards", "ribbons", "seeds", "shells", "stamps",
    "stones", "tickets", "tiles", "tomatoes",
)
TOPICS = (
    "photosynthesis", "volcanoes", "inflation", "black holes", "the water cycle", "vaccines", "the French Revolution",
    "machine learning", "recursion", "databases", "ocean tides", "plate tectonics", "the Silk Road", "jazz", "chess",
    "electric motors", "bees", "coral reefs", "the printing press", "antibiotics", "supply and demand", "gravity",
    "the human heart", "DNA", "glaciers", "the Roman Empire", "impressionism", "bread baking", "soil", "batteries",
    "earthquakes", "the alphabet", "compilers", "public transport", "solar energy", "memory", "sleep", "fermentation",
    "the stock market", "migration of birds", "rainbows", "steam engines", "satellites", "encryption", "architecture",
    "probability", "the moon", "rivers", "insects", "poetry", "the immune system", "opera", "tea", "deserts", "maps",
    "bridges", "paper", "wind", "democracy", "the periodic table", "mountains", "time zones", "music theory",
)
PLACES = (
    "Lisbon", "Nairobi", "Kyoto", "Oslo", "Lima", "Cairo", "Prague", "Hanoi", "Montreal", "Athens", "Istanbul",
    "Edinburgh", "Buenos Aires", "Helsinki", "Marrakesh", "Vienna", "Seoul", "Dublin", "Mumbai", "Warsaw",
)
PEOPLE = (
    "my neighbor", "a new colleague", "my teacher", "an old friend", "my landlord", "a customer", "my sister",
    "a job applicant", "my team", "the city council", "my grandfather", "a reader of my blog",
)
LANGUAGES = ("French", "German", "Spanish", "Italian", "Portuguese", "Dutch", "Polish", "Swedish", "Turkish")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
CODE_TOPICS = (
    "strings", "lists", "dictionaries", "sets", "tuples", "recursion", "sorting", "searching", "files", "paths", "JSON",
    "CSV files", "regular expressions", "dates and times", "random numbers", "prime numbers", "matrices", "graphs",
    "trees", "linked lists", "stacks and queues", "heaps", "dynamic programming", "classes", "inheritance",
    "decorators", "generators", "iterators", "context managers", "exceptions", "logging", "unit tests",
    "command line arguments",
    "environment variables", "threads", "processes", "asyncio", "sockets", "HTTP requests", "web scraping", "SQL",
    "SQLite", "configuration files", "type hints", "dataclasses", "enums", "string formatting", "list comprehensions",
    "lambda functions", "closures", "bit operations", "binary numbers", "text statistics", "palindromes", "anagrams",
    "caches", "memory use", "profiling", "games", "bank accounts", "shopping carts", "calendars", "temperature tables",
    "passwords", "encryption", "images", "plots", "pandas", "NumPy", "simple servers", "bots", "unit conversion",
)
MATH_TOPICS = (
    "addition and subtraction", "multiplication", "long division", "fractions", "decimals", "percentages", "ratios",
    "proportions", "averages", "unit prices", "discounts", "interest", "taxes and tips", "distances and speeds", "time",
    "money", "ages", "mixtures", "work rates", "linear equations", "systems of equations", "quadratic equations",
    "inequalities", "exponents", "square roots", "logarithms", "sequences", "geometric series", "prime factors",
    "divisibility", "remainders", "perimeters", "areas", "volumes", "triangles", "circles", "angles", "Pythagoras",
    "coordinates", "slopes", "functions", "derivatives", "integrals", "limits", "probability", "dice and coins",
    "combinations", "permutations", "sets", "vectors", "matrices", "word problems about shops",
    "word problems about farms", "word problems about schools", "word problems about trips", "recipes", "savings",
)
LIFE_TOPICS = (
    "cooking", "gardening", "travel", "job interviews", "birthdays", "weddings", "exercise", "running", "pets", "dogs",
    "cats", "parenting", "school", "homework", "friendship", "moving house", "neighbors", "cleaning", "budgets",
    "shopping", "gifts", "holidays", "hobbies", "photography", "films", "books", "short stories", "poems", "songs",
    "emails", "letters", "speeches", "meetings", "small talk", "sleep", "stress", "motivation", "habits", "coffee",
    "camping", "cars", "bicycles", "weather", "cities", "museums", "board games", "video games", "football", "swimming",
    "painting", "knitting", "furniture", "repairs", "first dates", "apologies", "thank-you notes", "jokes", "riddles",
)
# fmt: on

MATH = (
    "{first} has {a} {item} and buys {b} more. Then {second} takes {c} of them. How many {item} are left?",
    "A box holds {a} {item}. How many {item} are in {b} boxes?",
    "{first} packs {big} {item} into bags of {c}. How many full bags are there, and how many {item} are left over?",
    "{first} saves {a} dollars a week. After {b} weeks {first} spends {small} dollars. How much money is left?",
    "A train travels {big} kilometers in {c} hours. What is its average speed?",
    "A rectangle is {a} meters long and {b} meters wide. What are its area and its perimeter?",
    "{first} is {b} years older than {second}. Together they are {big} years old. How old is each of them?",
    "Solve for x: {c}x + {a} = {big}.",
    "Solve the equation {c}x - {b} = {a} step by step.",
    "What is {a} percent of {big}?",
    "A shop sells {item} at {c} dollars each and gives {b} percent off. What do {a} {item} cost?",
    "Compute {a} times {b} plus {c} and explain each step.",
    "The sum of three consecutive numbers is {big}. What is the middle number, if there is one?",
    "{first} reads {a} pages a day. How many days does a book of {big} pages take?",
    "There are {a} {item} and {b} {other}. What is the ratio of {item} to {other} in lowest terms?",
    "What is the greatest common divisor of {big} and {a}?",
    "Find the derivative of f(x) = {a}x^{c} + {b}x.",
    "A die is thrown {c} times. What is the probability that no six appears?",
    "Convert {big} minutes into hours and minutes.",
    "{first} runs {c} kilometers in {a} minutes. How long do {b} kilometers take at the same pace?",
    "What is the next number in the sequence {c}, {a}, ... if each number is {b} more than twice the one before {c}?",
    "A tank holds {big} liters and loses {c} liters an hour. How much is left after {b} hours?",
    "Simplify the fraction {a}/{big}.",
    "The average of {a}, {b} and x is {c}. What is x?",
    "{first} buys {c} packs of {item} with {b} in each pack and gives away {a} of them. How many are left?",
    "{first} earns {b} dollars an hour and works {c} hours a day. How much does {first} earn in {a} days?",
    "A baker bakes {big} rolls and sells {c} rolls to each customer. How many customers can be served?",
    "{first} and {second} share {big} {item} so that {first} gets {c} more than {second}. How many does each get?",
    "A car uses {c} liters of fuel per 100 kilometers. How much does it need for {big} kilometers?",
    "A class of {a} students is divided into groups of {c}. How many groups are there, and how many students are left?",
    "{first} has twice as many {item} as {second}. Together they have {big}. How many does {second} have?",
    "A recipe for {c} people needs {big} grams of flour. How much flour is needed for {a} people?",
    "The price of a ticket rises from {small} to {big} dollars. By how many percent does it rise?",
    "If {c} workers build a wall in {a} days, how long do {b} workers need?",
    "{first} walks {c} kilometers to school and back every day. How far is that in {b} days?",
    "A phone costs {big} dollars. {first} pays {c} equal installments. How much is one installment?",
    "What is {big} divided by {c}? Give the quotient and the remainder.",
    "Factor the expression x^2 + {a}x + {b} if possible.",
    "Find the slope of the line through ({c}, {a}) and ({b}, {big}).",
    "Evaluate the expression {a} + {b} * ({big} - {small}).",
    "What are the prime factors of {big}?",
    "How many ways are there to choose {c} {item} out of {b}?",
    "A circle has a radius of {c} centimeters. Find its area and its circumference.",
    "The sides of a right triangle are {a} and {b}. How long is the hypotenuse?",
    "A bank pays {c} percent interest a year. How much are {big} dollars worth after {b} years?",
    "{first} read {small} pages on Monday and {a} pages on Tuesday of a book of {big} pages. How many pages are left?",
    "Write {small}/{big} as a decimal and as a percentage.",
    "Add the fractions 1/{c} and 1/{b}.",
    "The temperature falls by {c} degrees every hour from {a} degrees. What is it after {b} hours?",
    "Half of the {big} {item} in a store are sold on the first day and {small} on the second. How many remain?",
)
SENTENCES = (
    "{first} met {second} in {place} on {day} to talk about {topic}.",
    "The museum in {place} shows {number} {item} that were found last year.",
    "On {day} it rained so hard that the market in {place} was closed.",
    "{first} has been writing a book about {topic} for {number} months.",
    "Nobody knew why {second} had left {number} {item} at the door.",
    "The course on {topic} starts on {day} and lasts {number} weeks.",
    "Few people in {place} remember how the old bridge was built.",
    "If the weather stays good, {first} will travel to {place} by bicycle.",
    "{second} asked whether the {item} could be delivered before {day}.",
    "Scientists from {place} published a study on {topic}.",
    "The library lends {number} {item} a day, which surprises most visitors.",
    "{first} thinks that {topic} should be taught in every school.",
    "After the concert, {first} and {second} walked home through {place}.",
    "The price of {item} has risen by {number} percent since {day}.",
    "A small company in {place} makes {item} for the whole country.",
    "{second} prefers to work in the evening, when the house is quiet.",
)
ABOUT_CODE = (
    "What does this Python function do?\n```python\n{source}\n```",
    "Explain this code line by line:\n```python\n{source}\n```",
    "Add type hints and a docstring to this function:\n```python\n{source}\n```",
    "Rewrite this function so that it is easier to read:\n```python\n{source}\n```",
    "Write unit tests for this function:\n```python\n{source}\n```",
    "Is there a bug in `{name}`? If so, fix it.\n```python\n{source}\n```",
    "Rename the variables of this function to clearer names:\n```python\n{source}\n```",
    "Show an example of how to call `{name}`:\n```python\n{source}\n```",
)
ABOUT_TEXT = (
    "Summarize the following text in one sentence:\n\n{text}",
    "Give the main points of this text:\n\n{text}",
    "Explain this paragraph in simple words:\n\n{text}",
    "Shorten this text to half its length:\n\n{text}",
    "Write three questions that this text answers, with the answers:\n\n{text}",
    "List the key terms of this text and define them:\n\n{text}",
    "What is the main idea of this paragraph?\n\n{text}",
    "Rewrite this text for a beginner:\n\n{text}",
)
ABOUT_CODE_TOPICS = (
    "What are {topic} in Python, and when are they useful?",
    "Give a short example of {topic} in Python and explain it.",
    "What mistakes do beginners make with {topic} in Python?",
    "How do I work with {topic} in Python?",
    "Write a small Python program that uses {topic}.",
    "Compare two ways of handling {topic} in Python.",
    "Write an exercise about {topic} in Python with a solution.",
)
QUESTIONS = (
    "What is {topic}?",
    "How does {topic} work?",
    "Why is {topic} important?",
    "Who discovered or invented {topic}?",
    "What are three facts about {topic}?",
    "What is the difference between {topic} and {other}?",
    "When did people first learn about {topic}?",
    "What is {place} known for?",
    "What are common misconceptions about {topic}?",
    "Explain {topic} to a ten-year-old.",
    "What problems does {topic} cause or solve?",
    "How has our understanding of {topic} changed over time?",
    "Give a short definition of {topic} and one example.",
    "What would happen without {topic}?",
)
REQUESTS = (
    "Write a short story that takes place in {place}.",
    "Write a poem about {topic}.",
    "Write a polite email to {person} about {topic}.",
    "Give me {number} tips for learning about {topic}.",
    "Plan a weekend in {place} for a family of four.",
    "What should I say to {person} who lost interest in {topic}?",
    "Make a list of {number} ideas for a talk about {topic}.",
    "I want to start collecting {item}. Where do I begin?",
    "Write a dialogue between two friends who disagree about {topic}.",
    "Suggest a title and an outline for an essay on {topic}.",
    "How can I explain {topic} to {person}?",
    "Write an advertisement for a shop in {place} that sells {item}.",
    "Describe a day in the life of someone who works with {topic}.",
    "Write {number} quiz questions about {topic} with their answers.",
    "Help me apologize to {person} for forgetting the {item}.",
    "Write a letter from {place} to {person}.",
    "Compare living in {place} with living in a small village.",
    "Give a step-by-step guide to organizing {item} at home.",
)
