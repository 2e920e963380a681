/* main() of the tests that have none.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

int main(void)
{
        return suite_main(suite_name());
}
