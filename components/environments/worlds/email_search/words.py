"""Word lists and sentence templates of the mailboxes. All names are invented."""

from __future__ import annotations

from typing import NamedTuple

FIRST = (
    "Ada", "Bruno", "Celia", "Dario", "Edda", "Falk", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Levin", "Mara", "Nils",
    "Olga", "Piet", "Rosa", "Stefan", "Tilda", "Ulf", "Vera", "Wim", "Yara", "Zeno",
)  # fmt: skip
LAST = (
    "Albrenk", "Borvald", "Castelhorn", "Dravik", "Ellwyn", "Farnoss", "Grubek", "Haldorf", "Istrava", "Jernquist",
    "Kolvane", "Lundrake", "Morvant", "Nestrova", "Ostrel", "Parvik", "Quillane", "Rostevin", "Sarnholt", "Tarnbeck",
    "Ulverson", "Vandrel", "Wesker", "Xandrel", "Yorvik", "Zellmer", "Brisklund", "Corvanti", "Dunhollow", "Evenrud",
    "Fenwater", "Gristle", "Hollenby", "Imberwood", "Jastrow", "Kestermann", "Larkvale", "Millbrant", "Norrick",
    "Oakvane", "Pellmont", "Ravensby", "Stormlund", "Thistleby", "Umberfeld", "Vossberg", "Winterhaus", "Yardveld",
)  # fmt: skip
FIRMS = (
    "Abrexa", "Belmora", "Cindrel", "Dovanta", "Erliko", "Fentora", "Gavelin", "Hexmoor", "Ivanto", "Juvela", "Kandrix",
    "Lomera", "Mistora", "Nuvelo", "Oprexi", "Pintara", "Quorvex", "Relanto", "Sivora", "Tremelo", "Uvanti", "Velcora",
    "Wandelo", "Zorvita",
)  # fmt: skip
FORMS = ("Ltd", "Services", "Works", "Group", "Partners")
ADJECTIVES = ("Silver", "Crimson", "Quiet", "Northern", "Amber", "Hidden", "Rapid", "Golden", "Polar", "Velvet")
NOUNS = ("Heron", "Harbor", "Falcon", "Meadow", "Lantern", "Summit", "Otter", "Compass", "Bridge", "Comet")
CITIES = ("Lisbon", "Oslo", "Vienna", "Porto", "Ghent", "Turin", "Malmo", "Krakow", "Leeds", "Basel", "Graz", "Nantes")
JOBS = ("catering", "printing", "transport", "lighting", "translation", "security")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


class Slot(NamedTuple):
    """Kind of fact about a project or a person."""

    kind: str
    """Kind of the values: money, number, date, person, firm, place, code."""
    words: str
    """Search words."""
    statements: tuple[str, ...]
    """Sentences that state the fact. Placeholders: {about} (project or person) and {value}."""
    changed: tuple[str, ...]
    """Sentences that state a new value of the fact."""
    ideas: tuple[str, ...]
    """Sentences with a false value."""
    asked: tuple[str, ...]
    """Questions about the fact."""
    before: str
    """Question about the value before the last change."""


PROJECT = {
    "budget": Slot(
        "money",
        "budget",
        ("The budget of {about} is {value}.", "Finance has set the budget of {about} to {value}."),
        ("New budget for {about}: it is {value} from now on.", "The budget of {about} was changed to {value}."),
        ("For {about} I would have asked for a budget of {value}, but nobody asked me.",
         "A budget of {value} for {about} was turned down."),
        ("What is the budget of {about}?", "How much money has {about} been given?"),
        "What was the budget of {about} before it was last changed?",
    ),
    "deadline": Slot(
        "date",
        "deadline finished",
        ("The deadline of {about} is {value}.", "{about} has to be finished by {value}, that is the deadline."),
        ("The deadline of {about} was moved to {value}.", "New deadline for {about}: {value}."),
        ("Somebody said that {value} is the deadline of {about}; that is wrong.",
         "I had hoped for {value} as the deadline of {about}, but no."),
        ("What is the deadline of {about}?", "By when does {about} have to be finished?"),
        "What was the deadline of {about} before it was last moved?",
    ),
    "kickoff": Slot(
        "date",
        "kickoff",
        ("The kickoff of {about} is on {value}.", "We begin {about} with a kickoff on {value}."),
        ("The kickoff of {about} had to be moved: it is on {value}.", "{about}: the kickoff is now on {value}."),
        ("For the kickoff of {about}, {value} did not suit anybody.",
         "{value} was my proposal for the kickoff of {about}; it was not taken."),
        ("When is the kickoff of {about}?", "On which day does {about} have its kickoff?"),
        "On which day was the kickoff of {about} before it was last moved?",
    ),
    "lead": Slot(
        "person",
        "leads lead",
        ("{value} leads {about}.", "I am glad that {value} takes the lead of {about}."),
        ("From now on {value} leads {about}.", "The lead of {about} has changed hands: it is {value} now."),
        ("{value} was asked to lead {about} and said no.", "I thought {value} would lead {about}, but I was wrong."),
        ("Who leads {about}?", "Who has the lead of {about}?"),
        "Who led {about} before the lead last changed?",
    ),
    "city": Slot(
        "place",
        "workshop",
        ("The workshop of {about} takes place in {value}.", "For the workshop of {about} we all go to {value}."),
        ("The workshop of {about} was moved to {value}.", "Change of plan: the workshop of {about} is in {value}."),
        ("{value} was too expensive for the workshop of {about}.",
         "I voted for {value} for the workshop of {about} and lost."),
        ("In which city is the workshop of {about}?", "Where does the workshop of {about} take place?"),
        "In which city was the workshop of {about} to be before it was last moved?",
    ),
    "supplier": Slot(
        "firm",
        "hardware supplier",
        ("The supplier of hardware for {about} is {value}.", "We chose {value} as supplier of hardware for {about}."),
        ("New supplier of hardware for {about}: {value}.", "For {about}, {value} takes over as supplier of hardware."),
        ("{value} wanted to be supplier of hardware for {about}; we declined.",
         "{value} was too slow to become supplier of hardware for {about}."),
        ("Who is the supplier of hardware for {about}?", "From which firm does {about} get its hardware?"),
        "Who was the supplier of hardware for {about} before the last change?",
    ),
    "contract": Slot(
        "code",
        "contract number",
        ("The contract for {about} has the number {value}.", "Please use contract number {value} for {about}."),
        ("The contract for {about} was replaced; its number is now {value}.",
         "New contract number for {about}: {value}."),
        ("{value} is not the contract number of {about}, as somebody wrote.",
         "Contract number {value} was a draft for {about} that was never signed."),
        ("What is the contract number of {about}?", "Which number does the contract for {about} have?"),
        "What was the contract number of {about} before it was last replaced?",
    ),
    "guests": Slot(
        "number",
        "guests launch",
        ("We expect {value} guests at the launch of {about}.", "The launch of {about} will have {value} guests."),
        ("The number of guests at the launch of {about} is now {value}.",
         "Launch of {about}: it is {value} guests now."),
        ("{value} guests would have been too many for the launch of {about}.",
         "I had dreamed of {value} guests at the launch of {about}."),
        ("How many guests are expected at the launch of {about}?", "How many guests will the launch of {about} have?"),
        "How many guests were expected at the launch of {about} before that was last changed?",
    ),
}  # fmt: skip
PERSON = {
    "extension": Slot(
        "number",
        "extension phone",
        ("The phone extension of {about} is {value}.", "You reach {about} by phone at extension {value}."),
        ("The phone extension of {about} has changed to {value}.", "{about} has a new phone extension: {value}."),
        ("{value} is not the extension of {about}; I rang a stranger.",
         "I tried extension {value} for {about}, and it was wrong."),
        ("What is the phone extension of {about}?", "At which extension can {about} be reached?"),
        "What was the phone extension of {about} before it last changed?",
    ),
    "deputy": Slot(
        "person",
        "deputy",
        ("The deputy of {about} is {value}.", "{value} is deputy of {about}, in case of questions."),
        ("{value} takes over as deputy of {about}.", "New deputy of {about}: {value}."),
        ("{value} is often taken for the deputy of {about}, wrongly.",
         "I would have liked {value} as deputy of {about}, but that is not to be."),
        ("Who is the deputy of {about}?", "Who stands in for {about} as deputy?"),
        "Who was the deputy of {about} before the last change?",
    ),
    "desk": Slot(
        "code",
        "desk",
        ("{about} now sits at desk {value}.", "The desk of {about} is {value}."),
        ("{about} has moved to desk {value}.", "The desk of {about} has changed: {value}."),
        ("I went to desk {value} for {about}: nobody there, wrong desk.",
         "Desk {value} was promised to {about} and then given away."),
        ("What is the number of the desk of {about}?", "At which desk does {about} sit?"),
        "At which desk did {about} sit before the last move?",
    ),
}  # fmt: skip
GREETINGS = ("Hi {name},", "Hello {name},", "Dear {name},", "{name},", "Good morning,")
CLOSINGS = ("Best,", "Regards,", "Thanks,", "Many thanks,", "Yours,")
REPLIES = (
    "Thank you, noted.",
    "Good to know.",
    "I will tell the others.",
    "Thanks, that helps.",
    "Understood. I put it into the plan.",
    "Fine with me.",
)
CHAT = (
    "I am out of the office on {weekday}.",
    "The coffee machine on the {floor} floor is broken again.",
    "Could somebody look over my slides for {project}?",
    "The minutes of {project} are in the usual folder.",
    "Please fill in your time sheet until {weekday}.",
    "There is cake in the kitchen, help yourselves.",
    "My train is late, please begin without me.",
    "{person} asked whether we need a larger room on {weekday}.",
    "The printer on the {floor} floor prints again.",
    "Did anybody see my umbrella?",
    "I met {person} at the fair, greetings to all.",
    "The talk about {project} was better than I had feared.",
    "Parking is difficult on {weekday} because of the market.",
    "We should speak about {project} some time.",
    "Has {firm} called back?",
    "The offer of {firm} is still on my desk.",
    "On {weekday} the heating is off.",
    "The new chairs came, they are on the {floor} floor.",
    "Let us keep this short.",
    "More when we meet.",
    "{person} is ill today.",
    "I have a question about {project}, but it can wait.",
    "The password of the guest network has changed, ask at the desk.",
    "Who takes the notes on {weekday}?",
)
SUBJECTS = (
    "{weekday}", "a small thing", "{project}", "question", "lunch", "the {floor} floor", "notes", "this week",
    "{firm}", "for your information", "meeting about {project}", "short update", "please read", "next steps",
)  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
FLOORS = ("first", "second", "third", "fourth", "fifth")
