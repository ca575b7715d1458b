// What search puts first: pages for users before what tells how it came about. searchtools.js wants `var`.
var AHEAD = /^docs\/(man\/|faq|troubleshooting)|^README/;
var BEHIND = /^docs\/(decisions\/|performance|renames|questions)|^CHANGELOG|^CONTRIBUTING/;

var Scorer = {
    score: ([docname, , , , score]) => score * (AHEAD.test(docname) ? 3 : BEHIND.test(docname) ? 0.3 : 1),
    objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
    title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
