/* cli/report/html_text.c: see html_text.h. */
#include "cli/report/html_text.h"

#include <string.h>

#include "cli/console/shown.h"

void html_escape(struct text *page, const char *text) {
    static const char special[] = "&<>\"'";
    static const char *const replacement[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
    while (*text != '\0') {
        size_t skipped = 0;
        const size_t bytes = shown_length(text, &skipped);
        const char *const found = strchr(special, *text);
        if (found != NULL) {
            const char *const instead = replacement[found - special];
            text_add(page, instead, strlen(instead));
        } else {
            text_add(page, bytes == 0 ? "?" : text, bytes == 0 ? 1 : bytes);
        }
        text += skipped;
    }
}
