// The search lists pages for users before pages for developers. searchtools.js wants `var`.
var AHEAD = /^docs\/(man|start|howto)\/|^README/;
var BEHIND = /^docs\/internals\/|^CHANGELOG|^CONTRIBUTING/;

var Scorer = {
    score: ([docname, , , , score]) => score * (AHEAD.test(docname) ? 3 : BEHIND.test(docname) ? 0.3 : 1),
    objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
    title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
