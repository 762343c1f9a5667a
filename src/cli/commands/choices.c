/* cli/commands/choices.c: see choices.h. */
#include "cli/commands/choices.h"

#include <string.h>

const char *choice_next(const char *choices, struct choice *choice) {
    if (*choices == '\0') {
        return NULL;
    }
    *choice = (struct choice){choices, strcspn(choices, "|")};
    choices += choice->length;
    return *choices == '|' ? choices + 1 : choices;
}

bool choices_have(const char *choices, const char *value) {
    const size_t length = strlen(value);
    struct choice choice;
    while ((choices = choice_next(choices, &choice)) != NULL) {
        if (choice.length == length && memcmp(choice.text, value, length) == 0) {
            return true;
        }
    }
    return false;
}

void choices_print(const char *choices, struct text *text) {
    struct choice choice;
    const char *between = "";
    for (const char *rest = choices; (rest = choice_next(rest, &choice)) != NULL;) {
        text_print(text, "%s%.*s", between, (int)choice.length, choice.text);
        between = strchr(rest, '|') == NULL ? " or " : ", ";
    }
}
