/* Places of monitors; see monitors.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/monitors.h"

#include <errno.h>

int monitors_join(struct monitors *m, uid_t uid, size_t *ret_place)
{
        size_t place = MONITORS_MAX, n_of_user = 0;

        for (size_t i = 0; i < MONITORS_MAX; i++) {
                if (!m->places[i].is_taken)
                        place = i;
                else
                        n_of_user += m->places[i].uid == uid;
        }
        if (place == MONITORS_MAX)
                return -EUSERS;
        if (n_of_user >= MONITORS_MAX_OF_USER)
                return -EDQUOT;
        m->places[place].is_taken = true;
        m->places[place].uid = uid;
        *ret_place = place + 1;
        return 0;
}

void monitors_leave(struct monitors *m, size_t place)
{
        if (place > 0)
                m->places[place - 1].is_taken = false;
}
