/* cli/html_text.c: see html_text.h. */
#include "cli/html_text.h"

#include <string.h>

void html_escape(struct text *page, const char *text) {
    static const char special[] = "&<>\"'";
    static const char *const replacement[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
    while (*text != '\0') {
        const size_t length = strcspn(text, special);
        text_add(page, text, length);
        text += length;
        if (*text != '\0') {
            const char *const found = replacement[strchr(special, *text) - special];
            text_add(page, found, strlen(found));
            ++text;
        }
    }
}
