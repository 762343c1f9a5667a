/* cli/commands/commands.h: the functions behind the command table, one file each, and the hidden commands. */
#ifndef OPAQ_CLI_COMMANDS_COMMANDS_H
#define OPAQ_CLI_COMMANDS_COMMANDS_H

#include "cli/command.h"

enum exit_code command_quantize(const struct command_call *call);
enum exit_code command_convert(const struct command_call *call);
enum exit_code command_inspect(const struct command_call *call);
enum exit_code command_verify(const struct command_call *call);
enum exit_code command_diff(const struct command_call *call);
enum exit_code command_formats(const struct command_call *call);
enum exit_code command_bench(const struct command_call *call);
enum exit_code command_reproduce(const struct command_call *call);
enum exit_code command_doctor(const struct command_call *call);
enum exit_code command_version(const struct command_call *call);
enum exit_code command_help(const struct command_call *call);
enum exit_code command_completion(const struct command_call *call);

/* Commands that the overview does not list. Ends with a name of NULL. */
extern const struct command_row hidden_command_table[];

/* Searches both tables; NULL if there is no command of that name. */
const struct command_row *command_find(const char *name);

/* "opaq: there is no command x; did you mean y?", to stderr. */
enum exit_code command_unknown(const char *name);

#endif
